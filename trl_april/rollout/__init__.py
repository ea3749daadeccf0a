"""A round: its loop, driver, requests, record, dynamic sampling and progress."""
