"""The HTML report: `page` puts it together, `svg` draws."""
