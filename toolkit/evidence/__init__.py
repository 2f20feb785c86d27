"""Evidence: results files, statistics, comparison, report."""
