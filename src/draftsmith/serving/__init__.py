"""What a real server does with an export: started, asked, and compared with our own loop."""
