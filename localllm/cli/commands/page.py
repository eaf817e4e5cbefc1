"""The web page's address, and the browser that shows it."""

from __future__ import annotations

import webbrowser

TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})  # the page needs JavaScript


def page_address(address: str, port: int) -> str:
    """Return the page's URL for a browser on this computer, from an address that the server listens on."""
    if address in ("0.0.0.0", "::", "*", ""):
        return f"http://localhost:{port}/"
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"


def open_page(url: str) -> bool:
    """Open a page in the user's browser, and return whether there is one that can show it."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return getattr(browser, "name", "") not in TEXT_BROWSERS and browser.open(url)
