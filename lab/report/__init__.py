"""Reports: CSV, JSON, and one HTML page that needs no network."""
