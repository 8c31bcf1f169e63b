"""Snapshots for other machines: a server of ranges, who may ask it, and slots that wait for who reads them."""
