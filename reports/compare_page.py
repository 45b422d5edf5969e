"""The report page of both sides with the comparison as its first section. Needs jinja2 and plotly, as the page does."""

from __future__ import annotations

from reports.compare import Comparison
from reports.compare_text import document
from reports.document import to_html
from reports.page import render


def comparison_section(comparison: Comparison) -> str:
    """The inside of a section, escaped: what the terminal prints."""
    return to_html(document(comparison))


def comparison_page(comparison: Comparison) -> str:
    """One offline page. Of repeats the first run of each side is drawn."""
    return render([comparison.a.first, comparison.b.first], comparison_section(comparison))
