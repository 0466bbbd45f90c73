//! Log writers: rotation without loss after kills of the agent, of the writer or of both.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::fixtures::wait::until_within;
use crate::support::{TestUser, needs_root, test_user, until};
use crate::system::{System, is_alive, kill, lines, processes};

/// The log writers of a log, or of those below a folder.
pub fn writers(folder: &Path) -> Vec<u32> {
    let is_writer = |pid: &u32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        command.starts_with("abide-log\0") && command.contains(&folder.display().to_string())
    };
    processes().into_iter().filter(is_writer).collect()
}

fn writer(folder: &Path) -> u32 {
    until("one writer runs", || writers(folder).len() == 1);
    writers(folder)[0]
}

/// The text of a log with its rotated files, oldest first.
pub fn whole(log: &Path) -> String {
    let rotated = |number: usize| PathBuf::from(format!("{}.{number}", log.display()));
    let mut files: Vec<PathBuf> = (1..2000).map(rotated).take_while(|path| path.exists()).collect();
    files.reverse();
    files.push(log.to_owned());
    files.iter().map(|path| std::fs::read_to_string(path).unwrap_or_default()).collect()
}

/// The numbers in lines `PREFIX NUMBER`.
pub fn numbers(text: &str, prefix: &str) -> Vec<u64> {
    text.lines().filter_map(|line| line.strip_prefix(prefix)?.trim().parse().ok()).collect()
}

fn rotated(mut spec: Value, max_size: u64, keep: u32) -> Value {
    spec["log"] = json!({"max_size": max_size, "keep": keep});
    spec
}

const COUNT: &str = "i=0; while [ $i -lt 100000 ]; do echo line $i; i=$((i+1)); done; exec sleep 1000";
const TICK: &str = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.01; done";

#[test]
fn a_fast_process_loses_no_line_and_a_killed_agent_changes_nothing() {
    let mut system = System::new();
    let spec = rotated(system.spec("app", COUNT), 50_000, 100);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let (pid, log) = (system.pid("app").expect("a pid"), system.path("log/app.log"));
    system.kill_agent();
    until("all is written", || whole(&log).lines().count() >= 100_000);
    let expected: String = (0..100_000).map(|number| format!("line {number}\n")).collect();
    assert!(whole(&log) == expected, "lost, doubled or reordered lines");
    let sizes: Vec<u64> = std::fs::read_dir(system.path("log"))
        .expect("a folder")
        .flatten()
        .map(|entry| entry.metadata().expect("a file").len())
        .collect();
    assert!(sizes.len() > 20 && sizes.iter().all(|size| *size <= 50_000), "{sizes:?}");
    let before = writer(system.folder.path());
    system.start_agent();
    assert_eq!((system.pid("app"), writer(system.folder.path())), (Some(pid), before), "both are taken over");
    assert_eq!(system.operate("app", 1, &Value::Null).0, 0);
    until("the writer ends with its process", || !is_alive(before));
    assert!(whole(&log) == expected);
}

#[test]
fn a_process_whose_writer_is_killed_lives_and_is_logged() {
    let mut system = System::new();
    let spec = rotated(system.spec("app", TICK), 1_000_000, 2);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let (pid, log) = (system.pid("app").expect("a pid"), system.path("log/app.log"));
    let ticks = || numbers(&whole(&log), "tick ");
    let grows = |what: &str| {
        let before = ticks().len();
        until(what, || ticks().len() > before + 20);
    };
    grows("it ticks");
    let first = writer(system.folder.path());
    kill(first, "KILL");
    until("another writer", || writers(system.folder.path()).iter().any(|pid| *pid != first));
    grows("it is logged again");
    // Without a reader the pipe keeps the lines.
    system.kill_agent();
    kill(writer(system.folder.path()), "KILL");
    until("no writer is left", || writers(system.folder.path()).is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert!(is_alive(pid), "the process lives without a reader");
    system.start_agent();
    grows("it is logged by the next agent's writer");
    assert_eq!(system.pid("app"), Some(pid));
    let seen = ticks();
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "no line twice");
    let lost = seen.last().map_or(0, |last| *last as usize + 1) - seen.len();
    assert!(lost <= 4, "{lost} lines are lost: more than a writer had read");
}

#[test]
fn changed_limits_take_effect_without_a_restart() {
    let system = System::new();
    let spec = rotated(system.spec("app", TICK), 1_000_000, 3);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let (pid, log) = (system.pid("app"), system.path("log/app.log"));
    let first = writer(system.folder.path());
    let smaller = rotated(spec, 500, 3);
    let body = json!({"meta": {"namespace": "web", "name": "app"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "spec": smaller});
    let answer = system.server.gse("update_proc_info", body);
    assert_eq!(answer["result"], true, "{answer}");
    until("the log is rotated", || system.path("log/app.log.1").exists());
    assert!(system.pid("app") == pid && writer(system.folder.path()) != first);
    let seen = numbers(&whole(&log), "tick ");
    assert!(seen.windows(2).all(|pair| pair[0] + 1 == pair[1]), "nothing is lost in between: {seen:?}");
}

fn of_user(system: &System, user: &TestUser, start: &str) -> Value {
    rotated(system.spec_of(user, "app", start), 500, 2)
}

#[test]
fn a_writer_has_the_rights_of_the_user_and_follows_no_link() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let secret = system.path("secret");
    std::fs::write(&secret, "secret\n").expect("a file");
    std::fs::create_dir_all(home.join("log")).expect("a folder");
    std::os::unix::fs::chown(home.join("log"), Some(user.uid), Some(user.gid)).expect("an owner");
    std::os::unix::fs::symlink(&secret, home.join("log/app.log")).expect("a link");
    system.refuses("app", &of_user(&system, &user, TICK), &["cannot open log_path", "symbolic link"]);
    std::fs::remove_file(home.join("log/app.log")).expect("it is removed");
    std::os::unix::fs::symlink(&secret, home.join("log/app.log.1")).expect("a link");
    assert_eq!(system.operate("app", 0, &of_user(&system, &user, TICK)).0, 0);
    until("the log is rotated twice", || home.join("log/app.log.2").exists());
    assert_eq!(std::fs::read_to_string(&secret).expect("a file"), "secret\n");
    let status = std::fs::read_to_string(format!("/proc/{}/status", writer(&home))).expect("a status");
    let ids = format!("Uid:\t{0}\t{0}\t{0}\t{0}", user.uid);
    assert!(status.contains(&ids), "{status}");
    // A process may open its output again.
    let mut again = system.spec_of(&user, "again", "echo by name > /dev/stdout; exec sleep 1000");
    again["log"] = json!({"max_size": 500});
    assert_eq!(system.operate("again", 0, &again).0, 0);
    until("it is written", || lines(&home.join("log/again.log")) == 1);
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_blocks_no_process_and_the_log_has_the_number_of_dropped_bytes() {
    if !needs_root() {
        return;
    }
    let system = System::new();
    let disk = system.path("disk");
    std::fs::create_dir(&disk).expect("a folder");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(&disk).status();
    assert!(mounted.expect("mount").success());
    let _mounted = Mounted(disk.clone());
    std::fs::write(disk.join("filler"), vec![0; 3_600_000]).expect("a file");
    let flood = "i=0; while [ $i -lt 200000 ]; do echo line $i; i=$((i+1)); done; echo all > flooded; ";
    let mut spec = rotated(system.spec("app", &format!("{flood}{TICK}")), 100_000_000, 2);
    spec["identity"]["log_path"] = json!(disk.join("app.log"));
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    until_within(Duration::from_secs(60), "the process is not blocked", || system.path("flooded").exists());
    std::fs::remove_file(disk.join("filler")).expect("it is removed");
    let text = || std::fs::read_to_string(disk.join("app.log")).unwrap_or_default();
    until("the log goes on", || text().contains("\ntick "));
    let text = text();
    let note = text.lines().find(|line| line.starts_with("abide: ")).expect("a note");
    assert!(note.ends_with("bytes of output were dropped: No space left on device (os error 28)"), "{note}");
    // The line at which the disk was full is cut.
    let (before, after) = text.split_once("\nabide: ").expect("a note");
    let whole = before.rsplit_once('\n').map_or("", |(lines, _)| lines);
    let seen = numbers(&format!("{whole}\n{after}"), "line ");
    assert!(seen.first() == Some(&0) && seen.windows(2).all(|pair| pair[0] < pair[1]), "in order");
    assert!(is_alive(system.pid("app").expect("a pid")));
}

/// CPU time of a process in ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("fields").1.split(' ').collect();
    [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

#[test]
fn a_log_that_cannot_be_rotated_is_written_without_using_the_cpu() {
    let system = System::new();
    std::fs::create_dir_all(system.path("log/app.log.1/x")).expect("a folder");
    let long = "head -c 6000 /dev/zero | tr '\\0' x; echo; ";
    let start = format!("echo first; {long}{long}echo last; exec sleep 1000");
    let spec = rotated(system.spec("app", &start), 4096, 1);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let log = system.path("log/app.log");
    until("all is written", || std::fs::read_to_string(&log).is_ok_and(|text| text.ends_with("\nlast\n")));
    let lengths: Vec<usize> = whole(&log).lines().map(str::len).collect();
    assert_eq!(lengths, [5, 6000, 6000, 4]);
    let writer = writer(system.folder.path());
    let before = cpu_ticks(writer);
    std::thread::sleep(Duration::from_millis(500));
    assert!(cpu_ticks(writer) - before < 10, "the writer is idle");
}

#[test]
fn a_request_for_too_many_rotated_files_is_refused() {
    let system = System::new();
    let spec = rotated(system.spec("app", TICK), 4096, u32::MAX);
    let body = json!({"meta": {"namespace": "web", "name": "app"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                      "op_type": 0, "spec": spec});
    let answer = system.server.call("POST", "/api/c/compapi/v2/gse/operate_proc/", body);
    assert!(answer["result"] == false && answer.to_string().contains("spec.log.keep"), "{answer}");
    assert_eq!(system.operate("app", 0, &rotated(system.spec("app", TICK), 4096, 1000)).0, 0);
}

#[test]
fn a_log_that_cannot_be_opened_again_blocks_no_process() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = system.home(&user);
    let flood = "until [ -e go ]; do sleep 0.01; done; i=0; while [ $i -lt 300000 ]; do echo line $i; i=$((i+1)); done; \
                 echo all > flooded; ";
    let spec = rotated(system.spec_of(&user, "app", &format!("{flood}{TICK}")), 1_000_000, 2);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let first = writer(&home);
    std::fs::rename(home.join("log"), home.join("away")).expect("it is moved");
    std::fs::write(home.join("log"), "a file instead of the folder").expect("a file");
    kill(first, "KILL");
    std::fs::write(home.join("go"), "").expect("a file");
    let limit = Duration::from_secs(60);
    until_within(limit, "the process is not blocked", || home.join("flooded").exists());
    std::fs::remove_file(home.join("log")).expect("it is removed");
    let text = || std::fs::read_to_string(home.join("log/app.log")).unwrap_or_default();
    until("the log goes on", || text().contains("\ntick "));
    let text = text();
    let note = text.lines().find(|line| line.starts_with("abide: ")).expect("a note");
    assert!(note.contains("bytes of output were dropped: cannot open the log: "), "{note}");
}

#[test]
fn a_stopped_process_leaves_its_last_lines() {
    let system = System::new();
    let last = "trap 'echo last line; exit 0' TERM; echo up; while :; do sleep 0.01; done";
    let spec = rotated(system.spec("app", last), 1_000_000, 2);
    let log = system.path("log/app.log");
    for round in 1..=3 {
        assert_eq!(system.operate("app", 0, &spec).0, 0);
        until("it is up", || lines(&log) == 2 * round - 1);
        assert_eq!(system.operate("app", 1, &Value::Null).0, 0);
        until("the last line is written", || lines(&log) == 2 * round);
    }
    // The message of a start that fails has the output.
    let failing = rotated(system.spec("app", "echo bind: Address already in use; exit 1"), 1_000_000, 2);
    let mut failing = failing;
    failing["monitor_policy"]["start_check_secs"] = json!(2);
    let (code, message) = system.operate("app", 0, &failing);
    assert!(code == 836 && message.contains("bind: Address already in use"), "{code} {message}");
}

/// The agent is killed at each step of a launch. The next one finds the process and its pipe, and no line is lost.
#[test]
fn a_crash_of_the_agent_at_any_step_of_a_launch_loses_no_line() {
    let places = ["intent-written", "writer-started", "born", "row-written", "done", "result-written"];
    std::thread::scope(|threads| {
        for place in places {
            threads.spawn(move || crash_at(place));
        }
    });
}

fn crash_at(place: &str) {
    let mut system = System::without_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    let spec = rotated(system.spec("app", TICK), 300, 1000);
    let task = system.begin("app", 0, &spec);
    let mut agent = system.agent.take().expect("it runs");
    assert!(!agent.wait().expect("it ends").success(), "it died at {place}");
    system.start_agent();
    let row = system.row("app", &task);
    assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
    let log = system.path("log/app.log");
    let ticks = || numbers(&whole(&log), "tick ");
    until("it is logged", || ticks().len() > 50);
    assert_eq!(system.operate("app", 1, &Value::Null).0, 0);
    until("every writer ends", || writers(system.folder.path()).is_empty());
    let seen = ticks();
    assert!(seen.iter().enumerate().all(|(nth, tick)| nth as u64 == *tick), "{place}: {seen:?}");
}
