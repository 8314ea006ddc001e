"""The HTML report of a run.

Enters: a record. Leaves: one page. Start at ``report.html.j2``; ``report.py`` makes what it shows, ``figures.py``
the figures.
"""

from sparkdl.pipeline.report.report import has_report, report_html, report_of, write_report

__all__ = ["has_report", "report_html", "report_of", "write_report"]
