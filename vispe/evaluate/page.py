"""The paper of a report: one HTML page that asks for nothing outside itself, by day and by night, on any screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from vispe.evaluate.runs import printable

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --raised: #f6f7f8; --ink: #1c1e21; --faint: #5c636b; --line: #d9dde1;
  --s0: #2f6db5; --s1: #c4512d; --s2: #24804f; --s3: #8a52a8; --s4: #97700a; --s5: #2b7f8d;
  --n0: #2a66ab; --n1: #79a6d8; --n2: #b5cfec; --n3: #d9e7f6; --f0: #f0b49f; --f1: #c9512c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --raised: #1e2125; --ink: #e8eaed; --faint: #a3abb4; --line: #363b42;
    --s0: #7fb2ef; --s1: #ee8f70; --s2: #66c795; --s3: #c69be0; --s4: #dcb64d; --s5: #74c4d1;
    --n0: #8cc0ff; --n1: #4f86c4; --n2: #335a86; --n3: #26405e; --f0: #8a4a35; --f1: #ee7f5a; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 2.5rem); }
header { padding-top: clamp(1.5rem, 5vw, 3rem); }
footer { padding-block: 2.5rem; color: var(--faint); font-size: .875rem; }
h1 { font-size: clamp(1.5rem, 4.5vw, 2.1rem); line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.015em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--s0); }
.lead, .note, figcaption { color: var(--faint); }
.note, figcaption { font-size: .875rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: 1rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.4rem, 1fr)); gap: .6rem; padding: 0;
  margin: 1.5rem 0 .5rem; list-style: none; max-width: 46rem; }
.tiles li { background: var(--raised); border-radius: .5rem; padding: .7rem .8rem; }
.tiles strong { display: block; font-size: clamp(1.5rem, 5vw, 1.9rem); line-height: 1.15; font-weight: 600;
  letter-spacing: -.02em; }
.tiles small, .between { color: var(--faint); font-size: .8125rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9375rem; }
th, td { text-align: left; padding: .38rem 1.4rem .38rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { font-weight: 600; white-space: nowrap; border-bottom-color: var(--faint); }
tbody th { font-weight: 400; }
.numbers th, .numbers td, .pairs td { white-space: nowrap; }
.numbers td, .numbers thead th + th { text-align: right; }
.facts th { color: var(--faint); white-space: nowrap; width: 1%; }
.facts td { overflow-wrap: anywhere; }
tr.theirs th, tr.theirs td { color: var(--faint); font-style: italic; }
.between { margin-left: .5em; }
code { font: .875em ui-monospace, monospace; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 1rem 0 0; min-width: 0; }
figure svg, figure img { display: block; width: 100%; height: auto; }
figure svg { max-width: 34rem; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure img { border: 1px solid var(--line); border-radius: .25rem; background: #fff; }
figcaption { margin-top: .4rem; overflow-wrap: anywhere; }
.plots figcaption, .table figcaption { margin: 0 0 .3rem; color: var(--ink); font-size: .9375rem; font-weight: 600; }
.table { margin: 1.6rem 0; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .3em; }
@media (max-width: 34rem) {
  th, td { padding-right: .9rem; }
  .numbers .between { display: block; margin: 0; }
  .numbers tbody th { white-space: normal; min-width: 6.5rem; }
  .facts th { white-space: normal; width: 36%; }
}
@media print { nav { display: none; } .scroll { overflow: visible; } figure, tr { break-inside: avoid; } }
"""


def words(value: object) -> str:
    """Anything as text of a page: escaped, without bytes that no page can hold."""
    return escape(printable(value))


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    theirs: Iterable[Sequence[str]] = (),
    kind: str = "numbers",
) -> str:
    """A table of cells that are HTML already; the first cell names its row. ``theirs``: rows that others measured."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    top = f"<thead><tr>{columns}</tr></thead>\n" if head else ""
    body = "\n".join([*(_row(cells) for cells in rows), *(_row(cells, ' class="theirs"') for cells in theirs)])
    return (
        f'<figure class="table"><figcaption>{words(caption)}</figcaption>\n'
        f'<div class="scroll" role="region" aria-label="{words(caption)}" tabindex="0">\n'
        f'<table class="{kind}">{top}<tbody>\n{body}\n</tbody></table></div></figure>'
    )


def _row(cells: Sequence[str], kind: str = "") -> str:
    return f'<tr{kind}><th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>"


def facts(caption: str, known: Mapping[str, object]) -> str:
    """Names and values in two columns; nested tables become dotted names."""
    return table(caption, (), [(words(name), _fact(value)) for name, value in flat(known)], kind="facts")


def flat(known: Mapping[str, object], before: str = "") -> list[tuple[str, object]]:
    """``{"a": {"b": 1}}`` as ``[("a.b", 1)]``."""
    found: list[tuple[str, object]] = []
    for name, value in known.items():
        found += flat(value, f"{before}{name}.") if isinstance(value, Mapping) else [(f"{before}{name}", value)]
    return found


def _fact(value: object) -> str:
    if isinstance(value, str):
        long = len(value) == 64 and set(value) <= set("0123456789abcdef")  # a sha256
        return f"<code>{value}</code>" if long else words(value) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_fact(item) for item in value) or "none"
    return words(f"{value:g}" if isinstance(value, float) else value)


def picture(inside: str, caption: str, *, above: bool = False) -> str:
    """A figure (an ``<svg>`` or ``<img>``) with its caption, both HTML already."""
    told = f"<figcaption>{caption}</figcaption>"
    return f"<figure>\n{told}\n{inside}\n</figure>" if above else f"<figure>\n{inside}\n{told}\n</figure>"


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page under a heading, reached by ``#name``."""
    inside = "\n".join(part for part in parts if part)
    heading = f'<h2 id="{name}-title">{words(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{inside}\n</section>'


def document(title: str, lead: str, sections: Sequence[tuple[str, str]], footer: str) -> str:
    """The whole page: a title, its lead (HTML), sections as (name, HTML of ``section``) and a last line."""
    links = "".join(f'<li><a href="#{name}">{words(name.capitalize())}</a></li>' for name, _ in sections)
    parts = "\n".join(inside for _, inside in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{words(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{words(title)}</h1>
{lead}
<nav aria-label="On this page"><ul>{links}</ul></nav>
</header>
<main>
{parts}
</main>
<footer>{words(footer)}</footer>
</body>
</html>
"""
