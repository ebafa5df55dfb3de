"""One result schema as tables, advice, CSV and plots; matplotlib loads only when something is drawn."""

from hotset.report.advice import recommendation
from hotset.report.csv import to_csv
from hotset.report.plot import check_plot, plot_hit_rates
from hotset.report.table import comparison_tables

__all__ = ["check_plot", "comparison_tables", "plot_hit_rates", "recommendation", "to_csv"]
