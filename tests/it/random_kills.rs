//! Random SIGKILLs of the agent in the middle of many operations: each start, restart and reload takes effect once.
//!
//! The children count: every operation has a number of its own, which its command appends to a file. By default a few
//! rounds; `ABIDE_SOAK=N` runs N times as many, `ABIDE_SEED=N` repeats one.

use serde_json::{Value, json};

use crate::support::until;
use crate::system::{System, is_alive, processes};

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
            Kind::RestartedDaemon => {
                let pid_path = system.path(&format!("run/{name}.pid"));
                let mut spec = system.spec(name, "");
                spec["identity"]["proc_name"] = json!("sleep");
                spec["control"] = json!({"start_mode": "daemon",
                    "start_cmd": format!("{counts}; setsid sleep 1000 & echo $! > {}", pid_path.display())});
                spec["monitor_policy"]["start_check_secs"] = json!(5);
                spec
            }
            Kind::Reloaded => {
                let mut spec = system.spec(name, "exec sleep 1000");
                spec["control"]["reload_cmd"] = json!(counts);
                spec
            }
        }
    }

    fn op(&self, round: usize) -> i64 {
        match self.kind {
            Kind::OneShot => 0,
            Kind::Restarted | Kind::RestartedDaemon | Kind::RestartedTree if round == 0 => 0,
            Kind::Restarted | Kind::RestartedDaemon | Kind::RestartedTree => 7,
            Kind::Reloaded if round == 0 => 0,
            Kind::Reloaded => 8,
        }
    }
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
    let kinds = [Kind::OneShot, Kind::Restarted, Kind::RestartedDaemon, Kind::RestartedTree, Kind::Reloaded];
    let subjects: Vec<Subject> =
        (0..15).map(|nth| Subject { name: format!("p{nth}"), kind: kinds[nth % kinds.len()] }).collect();
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
            if row["error_code"] == 0 && !(subject.kind == Kind::Reloaded && round == 0) {
                until(&told, || counted() > 0);
                assert_eq!(counted(), 1, "{told}\n{}", system.log());
            } else {
                assert!(counted() <= 1, "{told}\n{}", system.log());
                // Only a run whose end was lost may stay unresolved.
                let unknown = row["error_msg"].as_str().is_some_and(|text| text.contains("unknown"));
                let first = subject.kind == Kind::Reloaded && round == 0;
                assert!(first || unknown, "{told}\n{}", system.log());
            }
            if subject.kind == Kind::RestartedTree {
                until(&format!("one tree: {told}"), || tree_of(&system, &subject.name) == 2);
            }
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
