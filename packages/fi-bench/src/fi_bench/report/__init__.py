"""The HTML report: `rows` groups records, `charts` computes drawings, `page` renders the templates."""
