"""How an answer was made. recorder.py observes it, record.py stores the observations, choices.py shows the samplers'
effect, costs.py computes what operations read and multiply, account.py sums up, and page.py writes an HTML page."""
