//! A manifest to start from: commented, valid as it is, and made for a command if one is given.

use std::path::Path;

/// Text for a new file. `command`: what to run, word by word; `here`: an existing directory to run it in.
pub fn manifest(command: &[String], here: &Path) -> String {
    let example = ["sh".to_owned(), "-c".to_owned(), "while :; do date; sleep 5; done".to_owned()];
    let words = if command.is_empty() { &example[..] } else { command };
    let program = Path::new(&words[0]).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let name = if command.is_empty() { "hello".to_owned() } else { name_of(&program) };
    // `exec`: the shell that runs start_cmd becomes the process, and signals reach it.
    let start = format!("exec {}", shell_words::join(words)).replace("${", "$${");
    let here = here.to_string_lossy().replace("${", "$${");
    let here = here.trim_end_matches('/');
    let text = |text: &str| serde_json::Value::from(text).to_string();
    format!(
        r#"# A process for Abide. Check it with `abide validate FILE`, learn about a field with `abide explain FIELD`.
apiVersion: abide/v1
kind: Process
meta:
  namespace: default            # groups processes; with the name it identifies this one
  name: {name}
  # labels: {{tier: front}}       # to select by, as in `-l tier=front`
hosts:
  - {{ip: 127.0.0.1, bk_cloud_id: 0}}   # this machine
state: running                  # running | stopped | unhosted (running, not guarded) | absent
spec:
  identity:
    proc_name: {program}          # the executable's name, as /proc/PID/exe shows it
    setup_path: {setup}          # the working directory; it must exist
    pid_path: {pid}
    log_path: {log}
    value_key: {name}            # tells it from others with the same setup_path and proc_name
    # user: app                 # left out: the user that Abide's agent runs as
  control:
    start_mode: foreground      # start_cmd is the process; `daemon`: it leaves one behind that writes pid_path
    start_cmd: {start}
    # reload_cmd: kill -HUP $(cat {name}.pid)   # without one, a changed configuration restarts it
    # health_cmd: curl -fs http://127.0.0.1:8080/healthz
  monitor_policy:
    auto_type: 1                # 0 periodic (needs a crontab_rule), 1 resident, 2 one-shot
    start_check_secs: 1         # it counts as started if it is still there after this time
  # resource: {{cpu: 30, mem: 10}}        # limits in percent of the whole host; unset is no limit
  # env: {{PORT: "8080", DB_PASS: {{file: /run/secrets/db}}}}
"#,
        program = text(&program),
        setup = text(if here.is_empty() { "/" } else { here }),
        pid = text(&format!("{here}/{name}.pid")),
        log = text(&format!("{here}/{name}.log")),
        start = text(&start),
    )
}

/// A program's name as the name of a process.
fn name_of(program: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = program.chars().map(|c| if fits(c) { c } else { '-' }).take(60).collect();
    // A bare word: letters first, so that no reader takes it for a number.
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
