//! Captured output of commands: bounded in memory, whatever a command or a daemon prints.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{TestUser, test_user, until};
use crate::system::{System, is_alive, kill, lines, processes};

/// Below half of what the commands print, and above what a writer prints while a busy machine lets the agent wait.
const LIMIT: u64 = 400 << 20;
/// What the commands print: 1 GB, then two lines.
const FLOOD: &str = "head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo the last line";

fn daemon(system: &System, user: &TestUser, name: &str, start: &str) -> Value {
    let mut spec = system.spec_of(user, name, start);
    spec["control"]["start_mode"] = json!("daemon");
    spec["identity"]["proc_name"] = json!("sh");
    std::fs::create_dir_all(system.home(user).join("run")).expect("a folder");
    std::os::unix::fs::chown(system.home(user).join("run"), Some(user.uid), Some(user.gid))
        .expect("an owner");
    spec
}

/// The largest memory of any captured output of one agent or of a user's processes, until it is dropped.
struct Peak(Arc<AtomicBool>, Arc<AtomicU64>, Option<std::thread::JoinHandle<()>>);

impl Peak {
    fn of(pids: Vec<u32>) -> Peak {
        let (end, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, seen) = (Arc::clone(&end), Arc::clone(&most));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                for memory in pids.iter().flat_map(|pid| outputs(*pid)) {
                    seen.fetch_max(memory, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Peak(end, most, Some(thread))
    }

    fn most(mut self) -> u64 {
        self.0.store(true, Ordering::Relaxed);
        self.2.take().expect("a thread").join().expect("it ends");
        self.1.load(Ordering::Relaxed)
    }
}

/// The memory of each captured output that a process has open.
fn outputs(pid: u32) -> Vec<u64> {
    let Ok(folder) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let is_output = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:abide-output"))
    };
    let memory = |path: PathBuf| std::fs::metadata(path).ok().map(|meta| meta.blocks() * 512);
    folder.flatten().map(|entry| entry.path()).filter(is_output).filter_map(memory).collect()
}

fn agent(system: &System) -> u32 {
    system.agent.as_ref().expect("an agent").id()
}

#[test]
fn a_command_that_prints_without_end_takes_no_memory() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let mut spec = system.spec_of(&user, "app", "exec sleep 1000");
    spec["control"]["reload_cmd"] = json!(format!("{FLOOD}; exit 3"));
    spec["monitor_policy"]["op_timeout"] = json!(60);
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    let peak = Peak::of(vec![agent(&system)]);
    let (code, message) = system.operate("app", 8, &spec);
    let most = peak.most();
    assert!(code != 0 && message.contains("ended with 3"), "{code} {message:.200}");
    assert!(message.ends_with("xx\nthe last line") && message.len() < 8192, "{message:.200}");
    assert!(most > 0 && most < LIMIT, "{most} bytes of memory");
    until("the output is dropped with its command", || outputs(agent(&system)).is_empty());
    // A command that ends well is not disturbed either.
    spec["control"]["reload_cmd"] = json!(FLOOD);
    assert_eq!(system.operate("app", 8, &spec), (0, "success".to_owned()));
}

#[test]
fn a_daemon_that_prints_without_end_takes_no_memory_under_this_agent_and_the_next() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    // Three bursts are more than the limit.
    let start = "sh -c 'while :; do head -c 200000000 /dev/zero || touch failed; echo >> bursts; sleep 0.3; done' & echo $! > run/loud.pid";
    let spec = daemon(&system, &user, "loud", start);
    assert_eq!(system.operate("loud", 0, &spec), (0, "success".to_owned()));
    let pid = system.pid("loud").expect("a pid");
    let bursts = system.home(&user).join("bursts");
    let prints_more = || {
        let before = lines(&bursts);
        until("three bursts are printed", || lines(&bursts) >= before + 3);
    };
    let peak = Peak::of(vec![agent(&system), pid]);
    prints_more();
    let most = peak.most();
    assert!(most > 0 && most < LIMIT, "{most} bytes of memory");
    kill(pid, "STOP");
    system.kill_agent();
    system.start_agent();
    until("the next agent has trimmed the output", || {
        outputs(agent(&system)).iter().any(|most| *most < LIMIT)
    });
    let peak = Peak::of(vec![agent(&system), pid]);
    kill(pid, "CONT");
    prints_more();
    let most = peak.most();
    assert!(most > 0 && most < LIMIT, "{most} bytes of memory");
    assert_eq!(system.pid("loud"), Some(pid));
    assert!(!system.home(&user).join("failed").exists(), "no write failed");
    assert_eq!(system.operate("loud", 1, &spec).0, 0);
}

#[test]
fn output_of_processes_that_a_command_left_is_trimmed_until_they_end() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let mut spec = system.spec_of(&user, "app", "exec sleep 1000");
    spec["control"]["reload_cmd"] = json!(
        "sh -c 'for burst in 1 2 3 4 5; do sleep 0.3; head -c 200000000 /dev/zero; done; touch printed; exec sleep 1000' & echo $! > left"
    );
    assert_eq!(system.operate("app", 0, &spec).0, 0);
    assert_eq!(system.operate("app", 8, &spec), (0, "success".to_owned()));
    let home = system.home(&user);
    let left: u32 = std::fs::read_to_string(home.join("left")).expect("a pid").trim().parse().expect("a pid");
    let peak = Peak::of(vec![left]);
    until("it has printed", || home.join("printed").exists());
    let most = peak.most();
    assert!(most > 0 && most < LIMIT, "{most} bytes of memory");
    assert_eq!(outputs(agent(&system)).len(), 1);
    // The mapping of such memory would not be noticed: it cannot be opened to read and write.
    let mapped = user
        .command("sh")
        .args(["-c", &format!("exec 3<>/proc/{left}/fd/1")])
        .stderr(std::process::Stdio::null())
        .status()
        .expect("a shell");
    assert!(!mapped.success());
    kill(left, "KILL");
    until("the output goes with its last writer", || outputs(agent(&system)).is_empty());
    assert!(!is_alive(left) || !processes().contains(&left));
}
