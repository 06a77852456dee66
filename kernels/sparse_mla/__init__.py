"""Sparse MLA over selected cache rows."""
