"""Self-contained HTML pages: one template engine, one style, charts as inline SVG."""
