"""What experts do: the measures of a recorded workload and their report. What reads traces needs no torch."""
