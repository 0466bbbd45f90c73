//! Import of crontabs: one process of type schedule for each line with a schedule.
//!
//! cron runs a command with `/bin/sh -c`, as Abide does, so a command stays as it is. `%` is cron's own: the text after
//! the first one is the command's standard input.

use std::collections::BTreeMap;

use super::FileReader;
use super::draft::Draft;
use super::words::escaped;
use crate::manifest::document::Text;

/// The words for schedules, with their fields. `@reboot` has none.
const MACROS: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// Variables of cron itself, which the process does not get.
const OWN_VARIABLES: [&str; 4] = ["MAILTO", "MAILFROM", "CONTENT_TYPE", "CONTENT_TRANSFER_ENCODING"];

/// Variables for the following lines.
#[derive(Default)]
struct CronSettings {
    env: BTreeMap<String, String>,
    zone: Option<String>,
    shell: Option<String>,
}

/// Whether a text is a crontab: its first line that is not a comment or a variable begins with a schedule.
pub fn is_crontab(text: &str) -> bool {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut jobs = lines.filter(|line| variable(line).is_none());
    jobs.next().is_some_and(|line| split_schedule(line).is_some_and(|(_, command)| !command.is_empty()))
}

/// Whether a file of this name has a column for the user.
pub fn has_user_column(name: &str) -> bool {
    let is_in_cron_d = name.contains("/cron.d/") || name.starts_with("cron.d/");
    name == "/etc/crontab" || name.ends_with("/etc/crontab") || name == "etc/crontab" || is_in_cron_d
}

/// `with_user`: the command follows the name of its user.
pub fn read(file: &mut FileReader<'_, '_>, with_user: bool) -> Vec<Draft> {
    let text = file.source.text.clone();
    let mut settings = CronSettings::default();
    let mut drafts = Vec::new();
    for (line, text) in (1_u32..).zip(text.lines()) {
        let text = text.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        if let Some((name, value)) = variable(text) {
            set(&mut settings, name, value, line, file);
            continue;
        }
        if let Some(draft) = job(text, line, &settings, with_user, file) {
            drafts.push(draft);
        }
    }
    drafts
}

/// `NAME = VALUE`, with optional quotes around each.
fn variable(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once('=')?;
    let name = unquoted(name.trim());
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_name.then(|| (name, unquoted(value.trim())))
}

fn unquoted(text: &str) -> &str {
    let inner = |quote: char| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    inner('"').or_else(|| inner('\'')).unwrap_or(text)
}

fn set(settings: &mut CronSettings, name: &str, value: &str, line: u32, file: &mut FileReader<'_, '_>) {
    match name {
        "CRON_TZ" => settings.zone = Some(value.to_owned()),
        "SHELL" if value == "/bin/sh" || value.is_empty() => settings.shell = None,
        "SHELL" => {
            file.note(line, name, format!("commands run by {value} -c, inside of the agent's /bin/sh"));
            settings.shell = Some(value.to_owned());
        }
        "MAILTO" if value.is_empty() => {}
        _ if OWN_VARIABLES.contains(&name) => {
            file.note(line, name, "output is not mailed: `abide logs` shows it, and `notify` sends alerts");
        }
        _ => drop(settings.env.insert(name.to_owned(), escaped(value))),
    }
}

/// The fields of a schedule, and the rest of the line. A macro has one field.
fn split_schedule(line: &str) -> Option<(String, &str)> {
    if line.starts_with('@') {
        let (word, rest) = line.split_once(char::is_whitespace)?;
        return Some((word.to_ascii_lowercase(), rest.trim_start()));
    }
    let (mut rest, mut fields) = (line, Vec::new());
    for _ in 0..5 {
        let (field, after) = rest.split_once(char::is_whitespace)?;
        let is_field = |c: char| c.is_ascii_alphanumeric() || "*/,-~".contains(c);
        // Names are those of months and days.
        let is_name = |c: char| c.is_ascii_alphabetic();
        if !field.chars().all(is_field)
            || field
                .split(['/', ',', '-', '~'])
                .any(|part| part.is_empty() || part.chars().any(is_name) && part.len() != 3)
        {
            return None;
        }
        fields.push(field);
        rest = after.trim_start();
    }
    Some((fields.join(" "), rest))
}

/// The five fields of a schedule.
fn crontab_rule(schedule: &str, line: u32, file: &mut FileReader<'_, '_>) -> Option<String> {
    match schedule.strip_prefix('@') {
        None if schedule.contains('~') => {
            file.reject(line, "the schedule has a random time (~)", "write a fixed time");
            None
        }
        None => Some(schedule.to_owned()),
        Some("reboot") => {
            let message =
                "left out: no schedule expresses it; a process of type service starts with its agent";
            file.note(line, "@reboot", message);
            None
        }
        Some(_) => match MACROS.iter().find(|(word, _)| *word == schedule) {
            Some((_, rule)) => Some((*rule).to_owned()),
            None => {
                file.reject(line, format!("{schedule} is not a schedule"), "such as @daily or @hourly");
                None
            }
        },
    }
}

fn job(
    text: &str,
    line: u32,
    settings: &CronSettings,
    with_user: bool,
    file: &mut FileReader<'_, '_>,
) -> Option<Draft> {
    // Vixie cron: `-` before a schedule silences the log.
    let text = text
        .strip_prefix('-')
        .filter(|rest| rest.starts_with(|c: char| c == '*' || c == '@' || c.is_ascii_digit()))
        .unwrap_or(text);
    let Some((schedule, rest)) = split_schedule(text) else {
        file.reject(
            line,
            "neither a variable nor a schedule with a command",
            "such as 0 3 * * * /usr/bin/backup",
        );
        return None;
    };
    let rule = crontab_rule(&schedule, line, file)?;
    let (user, command) = match with_user {
        false => (None, rest),
        true => match rest.split_once(char::is_whitespace) {
            Some((user, command)) => (Some(user.to_owned()), command.trim_start()),
            None => (None, ""),
        },
    };
    if command.is_empty() {
        let hint = if with_user {
            "a line of a system crontab is: schedule, user, command"
        } else {
            "add a command"
        };
        file.reject(line, "the schedule has no command", hint);
        return None;
    }
    let (command, input) = split_input(command);
    let name = program_name(&command);
    let command = match &settings.shell {
        None => command,
        Some(shell) => format!("exec {} -c {}", quoted(shell), quoted(&command)),
    };
    let command = match input {
        None => command,
        Some(input) => {
            file.note(line, "%", "the text after % is the standard input, from a printf in a pipe");
            format!(
                "printf '%s\\n' {} | {{ {command}\n}}",
                input.iter().map(|line| quoted(line)).collect::<Vec<_>>().join(" ")
            )
        }
    };
    let mut draft = file.draft(line, name);
    draft.foreground(escaped(&command));
    let monitor = &mut draft.spec.monitor;
    monitor.auto_type = Some(0);
    monitor.crontab_rule = Some(Text(rule));
    monitor.crontab_zone = settings.zone.clone().map(Text);
    draft.spec.identity.user = user.map(Text);
    draft.spec.identity.setup_path =
        settings.env.get("HOME").filter(|home| home.starts_with('/')).map(|home| Text(home.clone()));
    draft.spec.env.clone_from(&settings.env);
    Some(draft)
}

/// The command, and the lines of its standard input. `\%` is a plain `%`.
fn split_input(text: &str) -> (String, Option<Vec<String>>) {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.next_if_eq(&'%').is_some() => {
                parts.last_mut().unwrap_or(&mut String::new()).push('%')
            }
            '%' => parts.push(String::new()),
            c => parts.last_mut().unwrap_or(&mut String::new()).push(c),
        }
    }
    let command = parts.remove(0).trim_end().to_owned();
    (command, (!parts.is_empty()).then_some(parts))
}

/// A word in single quotes for the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// The name of the first program: without folders, variables before it, and the usual wrappers.
fn program_name(command: &str) -> String {
    let is_assignment =
        |word: &&str| word.split_once('=').is_some_and(|(name, _)| !name.is_empty() && !name.contains('/'));
    let is_wrapper = |word: &&str| matches!(*word, "exec" | "nice" | "ionice" | "chronic");
    let words = command.split_whitespace().filter(|word| !word.starts_with(['-', '\'', '"']));
    let first = words.filter(|word| !is_assignment(word)).find(|word| !is_wrapper(word)).unwrap_or("job");
    first.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("job").trim_end_matches(';').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_split_from_commands() {
        let split = |line| split_schedule(line).map(|(schedule, rest)| format!("{schedule}|{rest}"));
        assert_eq!(
            split("*/5  0-6 1,15 jan mon\t/bin/x  y").as_deref(),
            Some("*/5 0-6 1,15 jan mon|/bin/x  y")
        );
        assert_eq!(split("@Daily root /bin/x").as_deref(), Some("@daily|root /bin/x"));
        assert_eq!(split("0 3 * * /bin/x y"), None);
        assert_eq!(split("buy milk, and bread for the party"), None);
        assert!(
            is_crontab("# x\nMAILTO=root\n0 3 * * * x\n") && !is_crontab("ip,cloud\n") && !is_crontab("")
        );
    }

    #[test]
    fn percent_signs_are_lines_of_the_input() {
        assert_eq!(split_input("date +\\%F"), ("date +%F".to_owned(), None));
        let lines = vec!["one".to_owned(), "two%".to_owned()];
        assert_eq!(split_input("mail x %one%two\\%"), ("mail x".to_owned(), Some(lines)));
    }

    #[test]
    fn a_name_is_that_of_the_program() {
        for (command, name) in [
            ("/usr/local/bin/backup.sh --all", "backup.sh"),
            ("LANG=C nice /bin/report", "report"),
            ("exec /opt/x/run", "run"),
            ("'quoted'", "job"),
        ] {
            assert_eq!(program_name(command), name, "{command}");
        }
        assert!(has_user_column("/etc/cron.d/php") && has_user_column("/etc/crontab"));
        assert!(!has_user_column("crontab") && !has_user_column("/home/me/crontab"));
    }
}
