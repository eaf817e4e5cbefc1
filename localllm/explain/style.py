"""The style sheet of the page, for light and dark themes. It uses no scripts and no external resources."""

CSS = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c1e21; --soft: #5b6168; --line: #d9dde2; --box: #f5f6f8;
  --prompted: #2f6fde; --decode: #198754; --verify: #b25e09; --drafted: #8a4fbe; --sample: #c2255c; --bar: #9db8e8; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --ink: #e6e8ea; --soft: #a0a7ae; --line: #353a40;
  --box: #1f2226; --prompted: #6ea2ff; --decode: #4cc38a; --verify: #f0a04b; --drafted: #c39bf0; --sample: #ff7aa2;
  --bar: #3d5a91; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem 1.25rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0.5rem 0 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; } p { margin: 0.3rem 0; max-width: 52rem; }
.soft, caption, small { color: var(--soft); } a { color: inherit; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; margin: 0.6rem 0; }
/* Ten whole lines. A shadow at the end, which the background of the text's own end covers, shows that there is more. */
.said { white-space: pre-wrap; max-height: 15.5em; overflow-y: auto;
  background: linear-gradient(var(--back), var(--back)) bottom / 100% 1.2em no-repeat local,
    linear-gradient(transparent, var(--line)) bottom / 100% 1.2em no-repeat scroll; }
.said:focus-visible { outline: 2px solid var(--prompted); }
dt { font-weight: 600; } dd { margin: 0; max-width: 52rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; margin: 0.4rem 0; }
caption { text-align: left; padding-bottom: 0.2rem; }
th, td { padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
code, .token { font-family: ui-monospace, monospace; font-size: 0.88rem; }
.tokens { display: flex; flex-wrap: wrap; gap: 0.3rem; margin: 0.4rem 0; padding: 0; list-style: none; }
.tokens li { border: 1px solid var(--line); border-radius: 0.3rem; background: var(--box); padding: 0 0.35rem;
  max-width: 100%; overflow-wrap: anywhere; line-height: 1.25; }
.tokens a { text-decoration: none; display: block; } .tokens small { display: block; font-size: 0.68rem; }
.tokens .cached { border-style: dashed; } .tokens .control { font-style: italic; }
.tokens .rare { border-bottom: 3px solid var(--sample); } .tokens .open { border-bottom: 3px solid var(--verify); }
.tokens .sure { border-bottom: 3px solid var(--decode); } .tokens .first { border-left: 4px solid var(--prompted); }
.bar { display: inline-block; height: 0.7rem; background: var(--bar); border-radius: 2px; vertical-align: baseline; }
.track { display: inline-block; width: 7rem; } .chosen td { font-weight: 700; } .out td { color: var(--soft); }
details { border: 1px solid var(--line); border-radius: 0.4rem; margin: 0.3rem 0; padding: 0.2rem 0.7rem; }
summary { cursor: pointer; overflow-wrap: anywhere; } details[open] { background: var(--box); }
:target { outline: 2px solid var(--prompted); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.prompt { fill: var(--prompted); } .decode { fill: var(--decode); } .verify { fill: var(--verify); }
.draft { fill: var(--drafted); } .sample { fill: var(--sample); } .axis { stroke: var(--line); }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin: 0 0.3rem 0 0.9rem; }
.key.prompt { background: var(--prompted); } .key.decode { background: var(--decode); }
.key.verify { background: var(--verify); } .key.draft { background: var(--drafted); }
.key.sample { background: var(--sample); }
"""
