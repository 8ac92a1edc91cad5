"""What is seen: readers of a run's files and samplers of the machine. No Textual, owns nothing."""
