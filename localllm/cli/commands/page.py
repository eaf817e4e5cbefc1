"""Build the URL of the web page, and open it in a browser."""

from __future__ import annotations

import threading
import webbrowser

from localllm.cli.terminal.console import say

TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})  # text browsers; the page needs JavaScript


def page_address(address: str, port: int) -> str:
    """Return the URL for a browser on this computer, from an address that the server listens on."""
    if address in ("0.0.0.0", "::", "*", ""):
        return f"http://localhost:{port}/"
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"


def show_page(url: str) -> None:
    """Open a page in the user's browser, or print its URL. The function returns at once, since some browsers run until
    they are closed."""

    def show() -> None:
        if not open_page(url):
            say(f"no browser could be started; open {url}")

    threading.Thread(target=show, daemon=True).start()


def open_page(url: str) -> bool:
    """Open a page in the user's browser. Return False if no browser can show it."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return getattr(browser, "name", "") not in TEXT_BROWSERS and browser.open(url)
