//! Starter manifest of `abide init`: commented, valid without edits, generated for a command if one is given.

use std::path::Path;

use crate::model::Name;

/// Values of the manifest that a user may choose.
#[derive(Clone, Debug, Default)]
pub struct InitOptions {
    /// Unset: `default`.
    pub namespace: Option<Name>,
    /// Unset: derived from the program.
    pub name: Option<Name>,
}

/// Text of the manifest. `command` is the argv to run (empty: an example), `here` an existing working directory. `None`: the
/// command has no program.
pub fn manifest(command: &[String], here: &Path, options: &InitOptions) -> Option<String> {
    let example = ["sh".to_owned(), "-c".to_owned(), "while :; do date; sleep 5; done".to_owned()];
    let words = if command.is_empty() { &example[..] } else { command };
    let program = Path::new(&words[0]).file_name()?.to_string_lossy();
    let name = match &options.name {
        Some(name) => name.to_string(),
        None if command.is_empty() => "hello".to_owned(),
        None => name_of(&program),
    };
    let namespace = options.namespace.as_ref().map_or_else(|| "default".to_owned(), ToString::to_string);
    let here = here.to_string_lossy().replace("${", "$${");
    let here = here.trim_end_matches('/');
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let word = |word: &str| if is_plain(word) { word.to_owned() } else { text(word) };
    Some(format!(
        r#"# A process for Abide. `abide validate FILE` checks this file, `abide explain FIELD` describes a field.
kind: Process
meta: {{namespace: {namespace}, name: {name}}}   # together they identify the process; labels: {{tier: front}}
hosts: [127.0.0.1]              # this machine; also "CLOUD:IP" and {{group: NAME}}
run: {start}
dir: {dir}          # working directory; it must exist
sandbox: {{no_new_privs: true}}   # setuid programs such as sudo, su and ping gain no rights; remove it if the process needs them
# user: app                     # unset: the user of Abide's agent
# type: job                     # service (default): kept running; job: runs once; schedule: "*/5 * * * *" runs it by time
# health: http://127.0.0.1:8080/healthz   # or tcp://HOST:PORT, or a command
# env: {{PORT: "8080", DB_PASS: {{file: /run/secrets/db}}}}
# reload_signal: HUP            # unset: a changed configuration restarts the process
# stop_timeout: 30s             # then the process is killed
# limits: {{memory: 512MB, cpu: 1.5}}
# log: {{max_size: 10MB, keep: 5}}        # `abide logs {namespace}/{name}` shows the output
"#,
        start = text(&start_command(words)),
        dir = text(if here.is_empty() { "/" } else { here }),
        namespace = word(&namespace),
        name = word(&name),
    ))
}

/// The command as text. Where a shell runs it, `exec` replaces the shell, so that signals reach the process.
fn start_command(words: &[String]) -> String {
    let joined = shell_words::join(words);
    let needs_no_shell = |c: char| c.is_ascii_alphanumeric() || "_./:,@%+- ".contains(c);
    let is_path = words[0].contains('/');
    let command = match is_path && joined.chars().all(needs_no_shell) {
        true => joined,
        false => format!("exec {joined}"),
    };
    command.replace("${", "$${")
}

/// Process name derived from a program's name.
fn name_of(program: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = program.chars().map(|c| if fits(c) { c } else { '-' }).take(60).collect();
    if is_plain(&name) { name } else { format!("run-{name}") }
}

/// Whether an unquoted YAML scalar is text, and not a number, a boolean or null.
fn is_plain(word: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.chars().all(fits)
        && !matches!(
            &*word.to_lowercase(),
            "y" | "n" | "yes" | "no" | "on" | "off" | "true" | "false" | "null"
        )
}
