//! Random SIGKILLs of the agent in the middle of many operations: each start, restart and reload takes effect once. No tree, log
//! writer or probe of an earlier process is left, a process that replaced another stays, and no line of a log is lost.
//!
//! The children count: every operation has a number of its own, which its command appends to a file. By default a few
//! rounds; `ABIDE_SOAK=N` runs N times as many, `ABIDE_SEED=N` repeats one.

use serde_json::{Value, json};

use crate::log_writer::{numbers, whole, writers};
use crate::support::until;
use crate::system::{System, is_alive, lines, processes};

const ROUNDS: usize = 5;

/// A process with the operation that each round asks of it.
struct Subject {
    name: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    OneShot,
    Restarted,
    RestartedDaemon,
    RestartedTree,
    Reloaded,
    /// Its reload starts the next process and ends the old one.
    Replaced,
    /// Its output goes through a log writer.
    Logged,
    /// A health probe that hangs is in flight at every kill.
    Probed,
    /// Its hooks run at least once per restart.
    Hooked,
}

impl Kind {
    /// The first operation is a start, and runs no counted command.
    fn is_reloaded(self) -> bool {
        matches!(self, Kind::Reloaded | Kind::Replaced | Kind::Probed)
    }
}

impl Subject {
    /// The spec of a round: its command appends the round's number.
    fn spec(&self, system: &System, round: usize) -> Value {
        let Subject { name, kind } = self;
        let counts = format!("echo {round} >> {name}.count");
        match kind {
            Kind::OneShot => {
                let mut spec = system.spec(name, &counts);
                spec["monitor_policy"]["auto_type"] = json!(2);
                spec
            }
            Kind::Restarted => system.spec(name, &format!("{counts}; exec sleep 1000")),
            Kind::RestartedTree => system.spec(name, &format!("{counts}; sleep 1000 & exec sleep 1000")),
            Kind::RestartedDaemon => daemon(system, name, &counts),
            Kind::Reloaded => {
                let mut spec = system.spec(name, "exec sleep 1000");
                spec["control"]["reload_cmd"] = json!(counts);
                spec
            }
            Kind::Replaced => {
                let mut spec = daemon(system, name, &format!("echo x >> {name}.starts"));
                let next = format!("setsid sleep 1000 & echo $! > {}", pid_file(system, name));
                spec["control"]["reload_cmd"] = json!(format!("{counts}; {next}; kill $ABIDE_PID"));
                spec
            }
            Kind::Logged => {
                let print = format!("i=0; while :; do echo round-{round} $i; i=$((i+1)); sleep 0.01; done");
                let mut spec = system.spec(name, &format!("{counts}; {print}"));
                spec["log"] = json!({"max_size": 3000, "keep": 1000});
                spec
            }
            Kind::Probed => {
                let mut spec = system.spec(name, "exec sleep 1000");
                spec["control"]["reload_cmd"] = json!(counts);
                let probe = format!("exec sleep {}", probe_secs(name));
                spec["health"] = json!({"cmd": probe, "interval": 1, "timeout": 600});
                spec
            }
            Kind::Hooked => {
                let here = system.folder.path().display().to_string();
                let hook =
                    |hook: &str| json!({"run": format!("sleep 0.05; echo {round} >> {here}/{name}.{hook}")});
                let mut spec = system.spec(name, &format!("{counts}; exec sleep 1000"));
                spec["hooks"] = json!({"before_stop": hook("stops"), "after_start": hook("started")});
                spec
            }
        }
    }

    fn op(&self, round: usize) -> i64 {
        match self.kind {
            Kind::OneShot => 0,
            _ if round == 0 => 0,
            Kind::Restarted | Kind::RestartedDaemon | Kind::RestartedTree | Kind::Logged | Kind::Hooked => 7,
            Kind::Reloaded | Kind::Replaced | Kind::Probed => 8,
        }
    }

    /// What has to hold after an operation, whenever the agent was killed.
    fn settles(&self, system: &System, round: usize, context: &str) {
        let name = &self.name;
        match self.kind {
            Kind::RestartedTree => {
                until(&format!("one tree: {context}"), || tree_of(system, name) == 2);
            }
            Kind::Replaced => {
                until(&format!("one process, which is held: {context}"), || {
                    let pid = system.pid(name).filter(|pid| is_alive(*pid));
                    let named = std::fs::read_to_string(pid_file(system, name)).unwrap_or_default();
                    pid.is_some_and(|pid| named.trim() == pid.to_string()) && tree_of(system, name) == 1
                });
                assert_eq!(lines(&system.path(&format!("{name}.starts"))), 1, "no relaunch: {context}");
            }
            Kind::Logged => {
                let log = system.path(&format!("log/{name}.log"));
                let numbers = |round: usize| numbers(&whole(&log), &format!("round-{round} "));
                until(&format!("it is logged: {context}"), || numbers(round).len() > 5);
                // A rotation while the files are read shows lines twice or not at all. A lost line stays lost.
                for round in 0..=round {
                    until(&format!("all lines of round {round}: {context}"), || {
                        let seen = numbers(round);
                        seen.iter().copied().eq(0..seen.len() as u64)
                    });
                }
                until(&format!("one log writer: {context}"), || {
                    writers(&log).len() == 1 && tree_of(system, name) <= 2
                });
            }
            Kind::Probed => {
                let probe = format!("sleep\0{}\0", probe_secs(name));
                let is_probe = |pid: &u32| {
                    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                    let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
                    command == probe.as_bytes() && cwd.starts_with(system.folder.path())
                };
                until(&format!("one probe: {context}"), || {
                    processes().iter().filter(|pid| is_probe(pid)).count() == 1
                });
            }
            Kind::Hooked => {
                let ran = |hook: &str, of: usize| {
                    let text =
                        std::fs::read_to_string(system.path(&format!("{name}.{hook}"))).unwrap_or_default();
                    text.lines().any(|line| line == of.to_string())
                };
                assert!(ran("started", round), "after_start: {context}");
                // A restart runs the hook of the program that it stops.
                assert!(round == 0 || ran("stops", round - 1), "before_stop: {context}");
                until(&format!("one process: {context}"), || tree_of(system, name) == 1);
            }
            Kind::OneShot | Kind::Restarted | Kind::RestartedDaemon | Kind::Reloaded => {}
        }
    }
}

fn pid_file(system: &System, name: &str) -> String {
    system.path(&format!("run/{name}.pid")).display().to_string()
}

/// A daemon whose start command runs another command first.
fn daemon(system: &System, name: &str, first: &str) -> Value {
    let mut spec = system.spec(name, "");
    spec["identity"]["proc_name"] = json!("sleep");
    let start = format!("{first}; setsid sleep 1000 & echo $! > {}", pid_file(system, name));
    spec["control"] = json!({"start_mode": "daemon", "start_cmd": start});
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec
}

/// The argument by which the probe of an instance is found.
fn probe_secs(name: &str) -> String {
    format!("47{}", name.trim_start_matches('p'))
}

#[test]
fn operations_take_effect_once_though_the_agent_is_killed_at_random() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("ABIDE_SEED").unwrap_or_else(seed_of_now);
    let rounds = ROUNDS * number("ABIDE_SOAK").unwrap_or(1) as usize;
    let mut state = seed;
    let mut random = |below: u64| {
        // A step of the splitmix64 generator.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)) % below
    };
    let mut system = System::new();
    let kinds = [
        Kind::OneShot,
        Kind::Restarted,
        Kind::RestartedDaemon,
        Kind::RestartedTree,
        Kind::Reloaded,
        Kind::Replaced,
        Kind::Logged,
        Kind::Probed,
        Kind::Hooked,
    ];
    let subjects: Vec<Subject> = (0..3 * kinds.len())
        .map(|nth| Subject { name: format!("p{nth}"), kind: kinds[nth % kinds.len()] })
        .collect();
    for round in 0..=rounds {
        let begin = |subject: &Subject| {
            let Subject { name, .. } = subject;
            system.begin(name, subject.op(round), &subject.spec(&system, round))
        };
        let tasks: Vec<Value> = subjects.iter().map(begin).collect();
        if round > 0 {
            std::thread::sleep(std::time::Duration::from_millis(random(120)));
            system.kill_agent();
            system.start_agent();
        }
        for (subject, task) in subjects.iter().zip(&tasks) {
            let row = system.row(&subject.name, task);
            let counted = || {
                let text = std::fs::read_to_string(system.path(&format!("{}.count", subject.name)));
                let own = round.to_string();
                text.unwrap_or_default().lines().filter(|line| *line == own).count()
            };
            let told = format!("seed {seed}, round {round}, {}: {row}", subject.name);
            let is_uncounted = subject.kind.is_reloaded() && round == 0;
            if row["error_code"] == 0 && !is_uncounted {
                until(&told, || counted() > 0);
                assert_eq!(counted(), 1, "{told}\n{}", system.log());
            } else {
                assert!(counted() <= 1, "{told}\n{}", system.log());
                // Only a run whose end was lost may stay unresolved.
                let unknown = row["error_msg"].as_str().is_some_and(|text| text.contains("unknown"));
                assert!(is_uncounted || unknown, "{told}\n{}", system.log());
            }
            subject.settles(&system, round, &told);
        }
    }
}

/// Live processes of an instance of this test.
fn tree_of(system: &System, name: &str) -> usize {
    let mark = format!("ABIDE_INSTANCE=0:127.0.0.1:web:{name}");
    let is_one = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        let is_marked = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
        is_marked && cwd.starts_with(system.folder.path()) && is_alive(*pid)
    };
    processes().iter().filter(|pid| is_one(pid)).count()
}

fn seed_of_now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |since| since.subsec_nanos().into())
}
