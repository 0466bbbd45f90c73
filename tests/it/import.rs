//! Import from other supervisors: mapped settings, reported settings, and limits of input.

use std::collections::BTreeMap;
use std::path::Path;

use abide::import::{ImportFile, ImportOptions, ImportResult, Kind, import};
use abide::manifest::{self, Limits, Problem, print};
use serde_json::Value;

use crate::apply::Machine;
use crate::support::{Tree, abide, project, stderr, stdout, until};
use crate::system::is_alive;

fn fixture(name: &str) -> String {
    let path = project().join("tests/it/fixtures/import").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A folder with copies of fixtures.
fn copies(names: &[&str]) -> Tree {
    let files: Vec<(&str, String)> = names.iter().map(|name| (*name, fixture(name))).collect();
    Tree::new(&files)
}

/// What the fixtures become, as people reviewed it.
fn as_reviewed(files: &[&str], more: &[&str], expected: &str) {
    let tree = copies(files);
    let mut args = vec!["import"];
    args.extend(files);
    args.extend(more);
    let output = abide(&args, tree.path(), b"");
    let here = tree.path().display().to_string();
    let said = format!("{}===\n{}", stdout(&output), stderr(&output)).replace(&here, "/HERE");
    assert_eq!(output.status.code(), Some(0), "{said}");
    let expected_file = project().join("tests/it/fixtures/import").join(expected);
    assert_eq!(said, std::fs::read_to_string(expected_file).unwrap_or_default());
    // The files in another order, and again: the same bytes.
    let reversed: Vec<&str> = std::iter::once("import").chain(files.iter().rev().copied()).collect();
    let again = abide(&[&reversed[..], more].concat(), tree.path(), b"");
    assert_eq!(stdout(&again), stdout(&output));
    // Both forms are good manifests, and mean the same.
    let json = abide(&[&args[..], &["-o", "json"]].concat(), tree.path(), b"");
    let (yaml, json) = (stdout(&output), stdout(&json));
    let load = |text: String| manifest::load_text("m", text, &Limits::default());
    let (yaml, json) = (load(yaml), load(json));
    assert!(yaml.problems.is_empty() && json.problems.is_empty(), "{:?} {:?}", yaml.problems, json.problems);
    let specs = |loaded: &manifest::Loaded| {
        let all = loaded.desired.instances.iter();
        all.map(|(key, want)| (key.to_string(), format!("{:?}", want.spec))).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(specs(&yaml), specs(&json));
    // With --strict nothing is handed out that is not whole.
    let strict = abide(&[&args[..], &["--strict"]].concat(), tree.path(), b"");
    assert_eq!((strict.status.code(), stdout(&strict).as_str()), (Some(65), ""));
}

#[test]
fn a_supervisord_file_becomes_manifests() {
    as_reviewed(&["shop.conf"], &["-n", "shop"], "shop.expected");
}

#[test]
fn units_and_timers_become_manifests() {
    as_reviewed(&["backup.service", "backup.timer", "db.service", "web@eu.service"], &[], "units.expected");
}

#[test]
fn the_sandbox_of_a_unit_becomes_the_sandbox_of_a_manifest() {
    as_reviewed(&["hardened.service"], &[], "hardened.expected");
}

#[test]
fn pm2_apps_become_manifests() {
    let hosts = ["--host", "0:10.0.0.1,0:10.0.0.2", "--run-dir", "/var/run/x", "--log-dir", "/logs"];
    as_reviewed(&["ecosystem.json"], &hosts, "ecosystem.expected");
}

#[test]
fn a_csv_of_hosts_becomes_groups() {
    as_reviewed(&["fleet.csv"], &[], "fleet.expected");
}

fn terms(from: Option<Kind>) -> ImportOptions {
    ImportOptions {
        from,
        namespace: "n".parse().expect("a name"),
        hosts: vec!["0:127.0.0.1".parse().expect("a host")],
        run_dir: Some("/run/abide".to_owned()),
        log_dir: Some("/var/log/abide".to_owned()),
    }
}

pub fn imported(name: &str, text: &str, from: Option<Kind>) -> Result<ImportResult, Vec<Problem>> {
    let given = ImportFile { name: name.into(), text: text.to_owned(), here: Some("/here".to_owned()) };
    import(&[given], &terms(from), &Limits::default())
}

/// The manifests and the notes, after a look at whether they are good.
fn good(name: &str, text: &str) -> (String, String) {
    let imported = imported(name, text, None).unwrap_or_else(|problems| panic!("{text}: {problems:?}"));
    let yaml = print::yaml(&imported.documents);
    let loaded = manifest::load_text("m", yaml.clone(), &Limits::default());
    assert_eq!(loaded.errors(), 0, "{yaml}\n{:?}", loaded.problems);
    let notes = imported.notes.iter().map(|note| format!("{}:{}: {}\n", note.file, note.line, note.setting));
    (yaml, notes.collect())
}

/// One setting each: its value in the manifest, and whether it is reported.
#[test]
fn settings_of_supervisord_are_mapped_or_reported() {
    let program = |more: &str| format!("[program:a]\ncommand=/bin/a\n{more}\n");
    for (setting, has, told) in [
        ("autostart=false", "state: stopped", ""),
        ("autorestart=false", "state: unhosted", "p.conf:3: autorestart\n"),
        ("autorestart=true", "auto_type: 1", ""),
        ("startretries=7", "start_retries: 7", ""),
        ("stopsignal=TERM", "start_mode", ""),
        ("stopsignal=SIGUSR2", "kill -USR2 $ABIDE_PID", "p.conf:3: stopsignal\n"),
        ("stdout_logfile=NONE", "value_key", ""),
        ("stdout_logfile=/l/%(program_name)s.log", "log_path: /l/a.log", ""),
        ("stderr_logfile=/l/e.log", "log_path: /l/e.log", "p.conf:3: stderr_logfile\n"),
        ("environment=A=\"%(ENV_X)s\"", "start_mode", "p.conf:3: environment A\np.conf:3: environment A\n"),
        ("environment=A=\"100%%\"", "A: \"100%\"", ""),
        ("environment=A=\"${HOME}\"", "A: \"$${HOME}\"", ""),
        ("umask=077", "umask: \"0077\"", ""),
        ("umask=abc", "start_mode", "p.conf:3: umask\n"),
        ("umask=022", "start_mode", ""),
        ("directory=/x y", "setup_path: /x y", ""),
        ("user=app", "user: app", ""),
        ("serverurl=AUTO", "start_mode", "p.conf:3: serverurl\n"),
        ("nonsense=1", "start_mode", "p.conf:3: nonsense\n"),
        (
            "numprocs=2\nnumprocs_start=1\nprocess_name=a%(process_num)d\nenvironment=P=\"80%(process_num)d\"",
            "P: \"80${instance}\"",
            "p.conf:5: process_name\n",
        ),
    ] {
        let (yaml, notes) = good("p.conf", &program(setting));
        assert!(yaml.contains(has), "{setting}: {yaml}");
        assert_eq!(notes, told, "{setting}");
    }
}

#[test]
fn settings_of_systemd_are_mapped_or_reported() {
    let unit = |more: &str| format!("[Service]\nExecStart=/bin/a\nRestart=always\n{more}\n");
    for (setting, has, told) in [
        ("ExecReload=/bin/kill -HUP $MAINPID", "reload_cmd: \"/bin/kill -HUP $ABIDE_PID\"", ""),
        ("ExecReload=/bin/x ${MAINPID}y", "reload_cmd: \"/bin/x \\\"$ABIDE_PID\\\"y\"", ""),
        ("ExecStop=/bin/a stop", "stop_cmd: \"/bin/a stop\"", "a.service:4: ExecStop\n"),
        ("WorkingDirectory=-/srv", "setup_path: /srv", "a.service:4: WorkingDirectory\n"),
        ("WorkingDirectory=/srv/%p", "setup_path: /srv/a", ""),
        ("Environment=\"A=b c\" D=%n", "env: {A: \"b c\", D: a.service}", ""),
        ("Environment=A=1\nEnvironment=\nEnvironment=B=2", "env: {B: \"2\"}", ""),
        ("EnvironmentFile=/etc/default/a", "env_file: /etc/default/a", ""),
        ("EnvironmentFile=-/etc/default/a", "env_file: /etc/default/a", "a.service:4: EnvironmentFile\n"),
        ("EnvironmentFile=/etc/default/*", "start_mode", "a.service:4: EnvironmentFile\n"),
        ("ExecStartPre=/bin/check", "hooks: {before_start: /bin/check}", ""),
        ("UMask=0077", "umask: \"0077\"", ""),
        ("UMask=0022", "start_mode", ""),
        ("PrivateTmp=no", "private_tmp: false", ""),
        ("ProtectSystem=yes", "protect_system: true", ""),
        ("ProtectSystem=no", "start_mode", ""),
        ("LimitFSIZE=1G", "ulimits: {fsize: 1073741824}", ""),
        ("LimitRTTIME=5ms", "start_mode", "a.service:4: LimitRTTIME\n"),
        ("CapabilityBoundingSet=", "capabilities: []", ""),
        ("MemoryMax=25%", "mem: 25.0", ""),
        ("MemoryMax=512M", "start_mode", "a.service:4: MemoryMax\n"),
        ("CPUQuota=20%", "start_mode", "a.service:4: CPUQuota\n"),
        ("StandardOutput=append:/l/a.log", "log_path: /l/a.log", ""),
        ("StandardOutput=journal", "log_path: /var/log/abide/n/a.log", "a.service:4: StandardOutput\n"),
        ("TimeoutStopSec=2min", "stop_check_secs: 120", ""),
        ("TimeoutStopSec=infinity", "start_mode", "a.service:4: TimeoutStopSec\n"),
        ("RestartSec=5", "start_interval: 5", ""),
        ("StartLimitBurst=9", "start_retries: 9", ""),
        ("Type=notify", "foreground", "a.service:4: Type\n"),
        ("Type=forking\nPIDFile=/run/a.pid", "start_mode: daemon", ""),
        ("Type=forking", "pid_path: /run/abide/n/a.pid", "a.service:4: Type\n"),
        ("Restart=no", "state: unhosted", ""),
        ("User=0", "user: root", ""),
        ("User=1000", "start_mode", "a.service:4: User\n"),
        ("Group=www", "start_mode", "a.service:4: Group\n"),
        ("[Install]\nWantedBy=multi-user.target", "start_mode", ""),
        ("[X-Mine]\nAnything=1", "start_mode", ""),
    ] {
        let (yaml, notes) = good("a.service", &unit(setting));
        assert!(yaml.contains(has), "{setting}: {yaml}");
        assert_eq!(notes, told, "{setting}");
    }
}

#[test]
fn settings_of_pm2_are_mapped_or_reported() {
    let app = |more: &str| format!("{{\"name\": \"a\", \"script\": \"/srv/a.js\"{more}}}");
    for (setting, has, told) in [
        ("", "start_cmd: \"exec node /srv/a.js\"", ""),
        (r#", "interpreter": "none", "args": "a 'b c'""#, "exec /srv/a.js a 'b c'", ""),
        (r#", "instances": 1"#, "name: a", ""),
        (r#", "instances": -1"#, "name: a", "a.json:1: instances\n"),
        (r#", "pid_file": "run/a.pid", "cwd": "/srv""#, "pid_path: /srv/run/a.pid", ""),
        (r#", "cwd": "sub""#, "setup_path: /here/sub", ""),
        (r#", "restart_delay": 2000"#, "start_interval: 2", ""),
        (
            r#", "log_file": "/l/all.log", "out_file": "/l/o.log""#,
            "log_path: /l/all.log",
            "a.json:1: out_file\n",
        ),
        (r#", "env": {"A": true, "B": [1]}"#, "env: {A: \"true\"}", "a.json:1: env B\n"),
    ] {
        let (yaml, notes) = good("a.json", &app(setting));
        assert!(yaml.contains(has), "{setting}: {yaml}");
        assert_eq!(notes, told, "{setting}");
    }
}

#[test]
fn a_pm2_process_list_becomes_manifests() {
    let one = r#"{"pid": 7, "name": "a", "pm2_env": {"name": "a", "pm_exec_path": "/srv/a.js", "pm_cwd": "/srv",
        "exec_interpreter": "node", "exec_mode": "cluster_mode", "status": "online", "pm_uptime": 1, "autorestart": true,
        "pm_out_log_path": "/root/.pm2/logs/a-out.log", "pm_pid_path": "/root/.pm2/pids/a.pid", "env": {"A": "1", "a": {}}}}"#;
    let (yaml, notes) = good("-", &format!("[{one}, {one}]"));
    for has in
        ["instances: 2", "exec node /srv/a.js", "log_path: /root/.pm2/logs/a-out.log", "env: {A: \"1\"}"]
    {
        assert!(yaml.contains(has), "{has}: {yaml}");
    }
    assert_eq!(notes, "-:2: exec_mode\n-:3: env\n");
}

#[test]
fn names_are_sanitized_and_stay_distinct() {
    let text = "[program:a b/c:d]\ncommand=x\n[program:a-b-c-d]\ncommand=x\n[program:w]\ncommand=x\nnumprocs=3\n\
                [program:w_2]\ncommand=x\n[program:名]\ncommand=x\n[program:@@]\ncommand=x\n";
    let (yaml, notes) = good("p.conf", text);
    let names: Vec<&str> = yaml.lines().filter_map(|line| line.strip_prefix("  name: ")).collect();
    assert_eq!(names, ["a-b-c-d", "a-b-c-d-2", "w", "w_2-2", "\"名\"", "unnamed"]);
    assert_eq!(notes.lines().count(), 5, "{notes}");
}

#[test]
fn a_self_dependency_is_dropped() {
    let unit = |after: &str| format!("[Unit]\nAfter={after}\n[Service]\nExecStart=/bin/x\n");
    let files: Vec<ImportFile> = [("a", "b.service"), ("b", "c.service"), ("c", "a.service c.service")]
        .map(|(name, after)| ImportFile {
            name: format!("{name}.service").into(),
            text: unit(after),
            here: None,
        })
        .into();
    let imported = import(&files, &terms(None), &Limits::default()).expect("it is read");
    let yaml = print::yaml(&imported.documents);
    let loaded = manifest::load_text("m", yaml.clone(), &Limits::default());
    assert!(loaded.problems.is_empty(), "{yaml}");
    assert_eq!(yaml.matches("depends_on").count(), 2, "{yaml}");
    assert_eq!(imported.notes.len(), 2, "{:?}", imported.notes);
}

#[test]
fn bad_input_is_refused_with_its_location() {
    for (name, text, place) in [
        ("a.conf", "[program:a]\nautostart=true\n", "a.conf:1:1: program \"a\" has no command"),
        ("a.conf", "[program:a]\ncommand='x\n", "a.conf:2:1: command cannot be read: a quote is not closed"),
        ("a.conf", "[program:a]\ncommand=date +%s\n", "a.conf:2:1: command: invalid % expansion"),
        (
            "a.conf",
            "[program:a]\ncommand=x\nenvironment=A\n",
            "a.conf:3:1: environment cannot be read: an entry has no `=`",
        ),
        (
            "a.conf",
            "[program:a]\ncommand=x\nstopsignal=$(reboot)\n",
            "a.conf:3:1: stopsignal: unknown signal",
        ),
        ("a.conf", "[program:a]\ncommand=x\njunk\n", "a.conf:3:1: neither a section nor a setting"),
        ("a.conf", "[supervisord]\nnodaemon=true\n", "a.conf:1:1: the file has no programs"),
        ("a.service", "[Service]\nType=simple\n", "a.service:1:1: the service has no ExecStart"),
        (
            "a.service",
            "[Socket]\nListenStream=80\n",
            "a.service:1:1: the unit has neither [Service] nor [Timer]",
        ),
        (
            "a.service",
            "[Service]\nExecStart=/a\nExecStart=/b\n",
            "a.service:3:1: only a oneshot service has several",
        ),
        (
            "a.service",
            "[Service]\nExecStart=/a\nRestartSec=soon\n",
            "a.service:3:1: RestartSec is not a duration",
        ),
        ("a.service", "", "a.service:1:1: the file is empty"),
        ("a.timer", "[Timer]\nOnCalendar=daily\n", "a.timer:1:1: nothing to import"),
        ("a.json", "{\"apps\": [\n{\"name\": \"x\"}]}", "a.json:2:1: the app has no script"),
        ("a.json", "{\"apps\": [", "a.json:1:10:"),
        ("a.json", "[1]", "a.json:1:1: not a list of apps"),
        ("a.csv", "name,rack\na,b\n", "a.csv:1:1: the header has no column for hosts"),
        ("a.csv", "ip,cloud\n10.0.0.1,x\n", "a.csv:2:1: the cloud area is not a number"),
        ("a.csv", "ip,cloud\nexample.org,0\n", "a.csv:2:1: not an IP address"),
        ("a.csv", "ip,cloud\n\"10.0.0.1,0\n", "a.csv:2:1: a quote is not closed"),
        ("a.csv", "ip,cloud\n", "a.csv:1:1: the file has no hosts"),
        ("a.txt", "hello\n", "a.txt:1:1: unknown file format"),
        ("ecosystem.config.js", "module.exports = {}", "ecosystem.config.js:1:1: the file is a program"),
    ] {
        let tree = Tree::new(&[(name, text)]);
        let output = abide(&["import", name], tree.path(), b"");
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(65), ""), "{name}: {text}");
        assert!(stderr(&output).contains(place), "{place}: {}", stderr(&output));
    }
    // What may be a secret is not repeated.
    let tree = Tree::new(&[("a.conf", "[program:a]\ncommand=x\nenvironment=KEY=\"hunter2\n")]);
    let told = stderr(&abide(&["import", "a.conf"], tree.path(), b""));
    assert!(told.contains("a.conf:3:1: environment cannot be read") && !told.contains("hunter2"), "{told}");
    let tree = Tree::new(&[("a.conf", &b"\x7fELF\x00\x01[program:a]\ncommand=x"[..])]);
    for (args, code) in [
        (&["import", "a.conf"][..], 65),
        (&["import", "nowhere.conf"], 65),
        (&["import", "."], 65),
        (&["import"], 64),
        (&["import", "-", "--from", "upstart"], 64),
        (&["import", "-", "--run-dir", "x"], 64),
        (&["import", "-", "--host", "here"], 64),
    ] {
        assert_eq!(abide(args, tree.path(), b"").status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn line_endings_boms_and_stdin_are_accepted() {
    let tree = Tree::new(&[("a.conf", b"\xef\xbb\xbf[program:a]\r\ncommand=/bin/a \"b c\"\r\nuser=app\r\n")]);
    let file = abide(&["import", "a.conf"], tree.path(), b"");
    assert!(stdout(&file).contains("run: \"exec /bin/a 'b c'\""), "{}", stdout(&file));
    assert!(stdout(&file).contains("user: app\n") && !stdout(&file).contains('\r'));
    let text = "[program:a]\ncommand=/bin/a \"b c\"\nuser=app\n";
    let stdin = abide(&["import", "-"], tree.path(), text.as_bytes());
    assert_eq!((stdout(&stdin), stderr(&stdin)), (stdout(&file), stderr(&file)));
    let unit =
        abide(&["import", "-", "--from", "systemd"], tree.path(), b"[Service]\nExecStart=/opt/x/run it\n");
    assert!(stdout(&unit).contains("  name: run\n"), "{}", stderr(&unit));
}

/// A small generator of our own: the same inputs each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

#[test]
fn random_input_never_panics() {
    let odd = [
        "%",
        "%(",
        "%(here)",
        "$",
        "${",
        "\\",
        "\"",
        "'",
        "[",
        "]",
        "=",
        "\n ",
        "\n",
        "\u{e000}",
        "@",
        "-",
        "\t",
        "é",
        "99999999999999999999",
        "{",
        "}",
        ",",
        "%(process_num)09d",
        "${instance}",
        "\nnumprocs=5\n",
        ";",
        "\r\n",
    ];
    let mut dice = Dice(7);
    for name in ["shop.conf", "db.service", "web@eu.service", "backup.timer", "ecosystem.json", "fleet.csv"] {
        let whole = fixture(name);
        for _ in 0..400 {
            let mut text: Vec<char> = whole.chars().collect();
            for _ in 0..=dice.roll(4) {
                let at = dice.roll(text.len());
                match dice.roll(3) {
                    0 => text.truncate(at.max(1)),
                    1 => drop(text.splice(at..at, odd[dice.roll(odd.len())].chars())),
                    _ => drop(text.splice(at..(at + dice.roll(40)).min(text.len()), [])),
                }
                if text.is_empty() {
                    text.push('[');
                }
            }
            let text: String = text.into_iter().collect();
            for from in [None, Some(Kind::ALL[dice.roll(4)])] {
                if let Ok(imported) = imported(name, &text, from) {
                    let yaml = print::yaml(&imported.documents);
                    let loaded = manifest::load_text("m", yaml.clone(), &Limits::default());
                    assert_eq!(loaded.errors(), 0, "{name}:\n{text}\n{yaml}\n{:?}", loaded.problems);
                }
            }
        }
    }
    // Long lines, long chains, many sections, and an unrealistic number of processes.
    let long = "x".repeat(300_000);
    let _ = imported("a.conf", &format!("[program:{long}]\ncommand={long}\nenvironment={long}={long}"), None);
    let _ =
        imported("a.service", &format!("[Service]\nExecStart=/{long} \\\n{}", "\\\n".repeat(10_000)), None);
    let many: String = (0..5_000).map(|n| format!("[program:p{n}]\ncommand=x {n}\n")).collect();
    assert_eq!(imported("a.conf", &many, None).expect("it is read").documents.len(), 5_000);
    let deep = "[".repeat(100_000);
    assert!(imported("a.json", &deep, None).is_err());
    let numbers = "[program:a]\ncommand=x %(process_num)d\nnumprocs=4000000000\n";
    assert!(imported("a.conf", numbers, None).is_err());
    let numbers = "[program:a]\ncommand=x\nnumprocs=4000000000\n";
    let tree = Tree::new(&[("a.conf", numbers)]);
    assert_eq!(abide(&["import", "a.conf"], tree.path(), b"").status.code(), Some(65));
    let chain: Vec<ImportFile> = (0..3_000)
        .map(|n| ImportFile {
            name: format!("u{n}.service").into(),
            text: format!("[Unit]\nAfter=u{}.service\n[Service]\nExecStart=/x\n", n + 1),
            here: None,
        })
        .collect();
    assert_eq!(import(&chain, &terms(None), &Limits::default()).expect("it is read").documents.len(), 3_000);
}

#[test]
fn imported_manifests_run() {
    let machine = Machine::new();
    let here = machine.folder.path().display().to_string();
    let write = |name: &str, text: String| std::fs::write(machine.path(name), text).expect("a file");
    write(
        "jobs.conf",
        format!(
            "[program:nap]\ncommand=sleep 1000\ndirectory={here}\nstartsecs=0\nautorestart=true\nnumprocs=2\n\
             process_name=%(program_name)s_%(process_num)d\n\
             [program:talk]\ncommand=sh -c 'echo \"$WHO $0\"; exec sleep 1000' \"it's me\"\ndirectory={here}\n\
             environment=WHO=\"a, b\"\nstartsecs=0\nautorestart=true\nstdout_logfile=talk.log\n"
        ),
    );
    write(
        "rest.service",
        format!(
            "[Service]\nEnvironment=LONG=1000\nExecStart=/bin/sleep ${{LONG}}\nRestart=always\nWorkingDirectory={here}\nKillSignal=SIGINT\n"
        ),
    );
    let dirs = [format!("{here}/run"), format!("{here}/log")];
    let args = ["import", "jobs.conf", "rest.service", "--run-dir", &dirs[0], "--log-dir", &dirs[1]];
    let (code, out, err) = machine.run(&args);
    assert_eq!(code, 0, "{err}");
    // A look at whether it has started takes seconds otherwise.
    let out =
        out.replace("monitor_policy: {auto_type: 1}", "monitor_policy: {auto_type: 1, start_check_secs: 0}");
    std::fs::write(machine.path("m/all.yaml"), out).expect("a file");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    let pids = machine.pids();
    assert_eq!(Vec::from_iter(pids.keys()), ["nap_1", "nap_2", "rest", "talk"]);
    assert!(pids.values().all(|pid| is_alive(*pid as u32)));
    let args = std::fs::read(format!("/proc/{}/cmdline", pids["rest"])).expect("its arguments");
    assert_eq!(args, b"/bin/sleep\x001000\x00");
    until("it spoke", || {
        std::fs::read_to_string(machine.path("talk.log")).is_ok_and(|text| text == "a, b it's me\n")
    });
    assert!(Path::new(&format!("{here}/run/imported/nap_2.pid")).exists());
    // Planned again, there is nothing to do; and it stops by its signal.
    assert!(machine.apply(&[]).1.contains("Nothing to do"));
    assert_eq!(machine.run(&["stop", "imported/rest"]).0, 0);
    until("it is gone", || !is_alive(pids["rest"] as u32));
    let rows: BTreeMap<String, Value> = machine.rows();
    assert_eq!(rows["rest"]["running"], false);
}
