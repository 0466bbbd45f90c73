//! Starter manifest of `abide init`: commented, valid without edits, generated for a command if one is given.

use std::path::Path;

/// Text of the manifest. `command` is the argv to run (empty: an example), `here` an existing working directory.
pub fn manifest(command: &[String], here: &Path) -> String {
    let example = ["sh".to_owned(), "-c".to_owned(), "while :; do date; sleep 5; done".to_owned()];
    let words = if command.is_empty() { &example[..] } else { command };
    let program = Path::new(&words[0]).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let name = if command.is_empty() { "hello".to_owned() } else { name_of(&program) };
    // `exec` replaces the shell that runs start_cmd, so that signals reach the process.
    let start = format!("exec {}", shell_words::join(words)).replace("${", "$${");
    let here = here.to_string_lossy().replace("${", "$${");
    let here = here.trim_end_matches('/');
    let text = |text: &str| serde_json::Value::from(text).to_string();
    format!(
        r#"# A process for Abide. `abide validate FILE` checks this file, `abide explain FIELD` describes a field.
apiVersion: abide/v1
kind: Process
meta:
  namespace: default            # with the name, identifies the process
  name: {name}
  # labels: {{tier: front}}       # for selectors such as `-l tier=front`
hosts:
  - {{ip: 127.0.0.1, bk_cloud_id: 0}}   # this machine
state: running                  # running | stopped | unhosted (running, not supervised) | absent
spec:
  identity:
    proc_name: {program}          # name of the executable, as /proc/PID/exe shows it
    setup_path: {setup}          # working directory; it must exist
    pid_path: {pid}
    log_path: {log}
    value_key: {name}            # distinguishes processes with the same setup_path and proc_name
    # user: app                 # unset: the user of Abide's agent
  control:
    start_mode: foreground      # start_cmd is the process; daemon: start_cmd leaves a background process that writes pid_path
    start_cmd: {start}
    # reload_cmd: kill -HUP $(cat {name}.pid)   # unset: a changed configuration restarts the process
    # health_cmd: curl -fs http://127.0.0.1:8080/healthz
  monitor_policy:
    auto_type: 1                # 0 periodic (needs a crontab_rule), 1 resident, 2 one-shot
    start_check_secs: 1         # seconds after which a running process counts as started
  sandbox:
    no_new_privs: true          # setuid programs such as sudo, su and ping gain no rights; remove it if the process needs them
  # resource: {{cpu: 30, mem: 10}}        # limits in percent of the whole host; unset: no limit
  # env: {{PORT: "8080", DB_PASS: {{file: /run/secrets/db}}}}
"#,
        program = text(&program),
        setup = text(if here.is_empty() { "/" } else { here }),
        pid = text(&format!("{here}/{name}.pid")),
        log = text(&format!("{here}/{name}.log")),
        start = text(&start),
    )
}

/// Process name derived from a program's name.
fn name_of(program: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = program.chars().map(|c| if fits(c) { c } else { '-' }).take(60).collect();
    // An unquoted YAML scalar must not parse as a number, a boolean or null.
    if name.starts_with(|c: char| c.is_ascii_alphabetic())
        && !matches!(
            &*name.to_lowercase(),
            "y" | "n" | "yes" | "no" | "on" | "off" | "true" | "false" | "null"
        )
    {
        name
    } else {
        format!("run-{name}")
    }
}
