from htp_export.exporter import export, tagging
