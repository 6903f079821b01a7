"""The paper of a report: everything is escaped, and tables are tables."""

import os

from vispe.evaluate import page


def test_words_are_escaped_and_printable():
    assert page.words("<a href='x'>&\n") == "&lt;a href=&#x27;x&#x27;&gt;&amp;␊"
    assert page.words(os.fsdecode(b"\xff")) == "\N{REPLACEMENT CHARACTER}"


def test_a_table_names_its_rows_and_columns():
    text = page.table("<t>", ["", "n"], [["a", "1"]], [["b", "2"]])
    assert '<th scope="col">n</th>' in text
    assert '<tr><th scope="row">a</th><td>1</td></tr>' in text
    assert '<tr class="theirs"><th scope="row">b</th><td>2</td></tr>' in text
    assert "&lt;t&gt;" in text
    assert "<t>" not in text


def test_facts_flatten_tables():
    assert page.flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == [("a.b", 1), ("a.c.d", 2), ("e", 3)]
    known = {"weights": "0" * 64, "none": None, "on": True, "off": False, "list": [1, 2.5], "empty": "", "<": "<"}
    text = page.facts("known", known)
    for row in (f"<code>{'0' * 64}</code>", "<td>none</td>", "<td>yes</td>", "<td>no</td>", "<td>1, 2.5</td>"):
        assert row in text
    assert '<th scope="row">&lt;</th><td>&lt;</td>' in text


def test_a_document_links_its_sections():
    text = page.document("<T>", "lead", [("one", page.section("one", "One & two", "inside", ""))], "end")
    assert "<title>&lt;T&gt;</title>" in text
    assert '<a href="#one">One</a>' in text
    assert '<section id="one" aria-labelledby="one-title">\n<h2 id="one-title">One &amp; two</h2>\ninside\n' in text
    assert text.startswith("<!doctype html>")
    assert '<html lang="en">' in text


def test_a_picture_has_its_caption_on_either_side():
    below, above = page.picture("<svg>", "c"), page.picture("<svg>", "c", above=True)
    assert below.index("<svg>") < below.index("<figcaption>")
    assert above.index("<svg>") > above.index("<figcaption>")
