//! The top-level help: verbs in groups, generated from the clap commands.
//!
//! clap has no headings for subcommands, so the list is part of a help template. `-h`, `--help` and `help` share it.

use clap::builder::StyledStr;
use clap::{Command, CommandFactory};

use super::args::Args;

/// Verbs by heading, in the order in which they are shown.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Write manifests", &["init", "validate", "render", "explain", "schema"]),
    ("Plan and apply", &["plan", "diff", "apply", "watch", "rollback", "rollout"]),
    ("Inspect", &["status", "get", "describe", "why", "logs", "history", "inventory"]),
    (
        "Operate",
        &[
            "start",
            "stop",
            "restart",
            "reload",
            "kill",
            "release",
            "unprotect",
            "own",
            "pause",
            "resume",
            "lease",
        ],
    ),
    ("Run", &["up", "down", "serve", "agent", "token", "host"]),
    ("Convert", &["import", "export", "convert"]),
    (TOOLS, &["doctor", "config", "notify", "access", "audit", "completions", "man", "version"]),
];

/// The group of verbs that have no other.
const TOOLS: &str = "Tools";

/// The `help` verb is clap's own: it is not among the commands before they are built.
const HELP: (&str, &str) = ("help", "Print help for a verb");

/// The command line, with grouped verbs in its help.
pub fn command() -> Command {
    let command = Args::command();
    let template = template(&command);
    command.help_template(template)
}

fn template(command: &Command) -> StyledStr {
    use std::fmt::Write;
    let header = command.get_styles().get_header();
    let mut text = StyledStr::new();
    let _ = write!(text, "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{}\n", grouped_verbs(command));
    let _ = write!(text, "{header}Global options:{header:#}\n{{options}}{{after-help}}");
    text
}

fn grouped_verbs(command: &Command) -> String {
    let (header, literal) = (command.get_styles().get_header(), command.get_styles().get_literal());
    let verbs: Vec<(&str, String)> = command
        .get_subcommands()
        .filter(|verb| !verb.is_hide_set())
        .map(|verb| (verb.get_name(), verb.get_about().map(ToString::to_string).unwrap_or_default()))
        .chain([(HELP.0, HELP.1.to_owned())])
        .collect();
    let width = verbs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let is_grouped = |name: &str| GROUPS.iter().any(|(_, names)| names.contains(&name));
    let mut text = String::new();
    for (heading, names) in GROUPS {
        text.push_str(&format!("\n{header}{heading}:{header:#}\n"));
        let listed = names.iter().filter_map(|name| verbs.iter().find(|(verb, _)| verb == name));
        // A verb without a group is listed too.
        let others = verbs.iter().filter(|(name, _)| heading == TOOLS && !is_grouped(name));
        for (name, about) in listed.chain(others) {
            text.push_str(&format!("  {literal}{name:<width$}{literal:#}  {about}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_is_in_exactly_one_group() {
        let command = Args::command();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn the_list_of_verbs_fits_into_80_columns() {
        let help = command().render_help().to_string();
        let list = help.split("Global options:").next().expect("text");
        for verb in Args::command().get_subcommands() {
            let about = verb.get_about().expect("a one-liner").to_string();
            assert!(list.contains(&about), "{about}");
        }
        assert!(list.lines().all(|line| line.chars().count() <= 80), "{list}");
    }
}
