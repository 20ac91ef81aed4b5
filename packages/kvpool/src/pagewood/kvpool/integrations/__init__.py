"""Page stores of other projects as tiers; a module for each, and nothing else imports these projects."""
