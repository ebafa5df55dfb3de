"""One result schema as tables, advice, CSV, data frames and plots; matplotlib and pandas load when they are used."""

from hotset.report.advice import recommendation
from hotset.report.csv import to_csv
from hotset.report.frames import to_pandas
from hotset.report.plot import check_plot, plot_hit_rates
from hotset.report.table import comparison_tables

__all__ = ["check_plot", "comparison_tables", "plot_hit_rates", "recommendation", "to_csv", "to_pandas"]
