"""The HTML report of a run.

Enters: a record. Leaves: one page. Start at ``report.py``; ``html.py`` is why no value of the data can become markup.
"""

from sparkdl.pipeline.report.report import has_report, report_html, write_report

__all__ = ["has_report", "report_html", "write_report"]
