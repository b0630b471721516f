"""What a run tells: the HTML report and the live page, from event logs alone."""
