"""Readers of tables: CSV and TSV, Parquet."""
