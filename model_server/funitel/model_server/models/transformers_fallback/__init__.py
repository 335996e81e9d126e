"""Models that no row of the table describes, by the code of transformers over our blocks."""
