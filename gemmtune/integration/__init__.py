"""Ways into models and other libraries."""
