//! Process trees at random and across kills of the agent: a tree is ended whole, and never without an owner.

use serde_json::{Value, json};

use crate::process_tree::{
    KILL, RELOAD, RESTART, START, STOP, alive, get, haproxy, nginx, replaced, restart_agent,
};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill, lines, parent_of, processes};

/// Forks, leaves its session, loses its environment and exits at random. A line `begun` per fork, a line with the pid per
/// process that has done all that.
const RANDOM_TREE: &str = r#"
import os, random, sys
seed = sys.argv[1]
def note(text):
    file = os.open("tree.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (text + "\n").encode())
    os.close(file)
def live(path):
    dice = random.Random(seed + path)
    if path and dice.random() < 0.3: os.setsid()
    for nth in range(dice.randint(0, 3) if len(path) < 4 else 0):
        note("begun")
        if os.fork() == 0:
            return live(path + str(nth))
    note(f"settled {os.getpid()}")
    act = dice.random() if path else 1
    if act < 0.4:
        os._exit(0)
    if act < 0.7:
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os.execve("/bin/sleep", ["sleep", "1000"], os.environ)
note("begun")
live("")
"#;

#[test]
fn random_trees_are_ended_whole_and_nothing_else() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        std::fs::write(system.path("tree.py"), RANDOM_TREE).expect("a script");
        let bystander = |env: &str| {
            let mut command = std::process::Command::new("sleep");
            command.arg("1000").current_dir(system.folder.path()).env("ABIDE_INCARNATION", env);
            crate::apply::KillOnDrop(command.spawn().expect("it starts"))
        };
        let bystanders = [bystander(""), bystander("0123456789abcdef0123456789abcdef")];
        for seed in 0..6 {
            let seed = format!("{seed}-{groups}-");
            let name = format!("p{seed}").replace('-', "");
            let spec = system.spec(&name, &format!("exec python3 tree.py {seed}"));
            assert_eq!(system.operate(&name, START, &spec).0, 0);
            let settled = || {
                let text = std::fs::read_to_string(system.path("tree.log")).unwrap_or_default();
                let pids = text.lines().filter_map(|line| line.strip_prefix("settled ")?.parse().ok());
                let pids: Vec<u32> = pids.collect();
                (pids.len() == text.lines().filter(|line| *line == "begun").count()).then_some(pids)
            };
            until("the tree is complete", || settled().is_some_and(|pids| !pids.is_empty()));
            let old = settled().expect("pids");
            let main = system.pid(&name).expect("a pid");
            kill(main, "KILL");
            replaced(&system, &name, main);
            let left: Vec<u32> = old.iter().copied().filter(|pid| is_alive(*pid)).collect();
            assert!(left.is_empty(), "{seed}: {left:?} of {old:?}\n{}", system.log());
            until("the tree is complete", || settled().is_some_and(|pids| pids.len() == 2 * old.len()));
            assert_eq!(system.operate(&name, STOP, &spec).0, 0);
            let own: Vec<u32> = bystanders.iter().map(|one| one.0.id()).collect();
            let mut left = alive(&system);
            left.retain(|pid| !own.contains(pid));
            assert_eq!(left, [0u32; 0], "{seed}: {}", system.log());
            assert!(own.into_iter().all(is_alive), "{seed}: a bystander was killed");
            std::fs::remove_file(system.path("tree.log")).expect("a file");
        }
    }
}

/// A process with two workers, one of which ignores SIGTERM.
const WORKERS: &str = "echo up >> starts; sleep 1000 & (trap '' TERM; exec sleep 1000) & exec sleep 1000";

#[test]
fn a_killed_agent_leaves_no_tree_without_an_owner() {
    // Where the agent dies while it ends or relaunches a tree.
    let cases: [(Option<i64>, &str); 9] = [
        (Some(STOP), "unguarded"),
        (Some(STOP), "signalled"),
        (Some(STOP), "main-ended"),
        (Some(STOP), "done"),
        (Some(KILL), "signalled"),
        (Some(RESTART), "main-ended"),
        (Some(RESTART), "born"),
        (None, "tree-ended"),
        (None, "born"),
    ];
    std::thread::scope(|threads| {
        for (op, place) in cases {
            threads.spawn(move || {
                let mut system = System::new();
                let mut spec = system.spec("p", WORKERS);
                spec["monitor_policy"]["stop_check_secs"] = json!(1);
                assert_eq!(system.operate("p", START, &spec).0, 0);
                until("the tree is complete", || alive(&system).len() == 3);
                let (old, main) = (alive(&system), system.pid("p").expect("a pid"));
                system.kill_agent();
                system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
                until("it is held again", || system.process("p")["agent"] == true);
                let task = op.map(|op| system.begin("p", op, &spec));
                if op.is_none() {
                    kill(main, "KILL");
                }
                assert!(!system.agent.take().expect("it runs").wait().expect("it ends").success(), "{place}");
                system.start_agent();
                if let Some(task) = task {
                    let row = system.row("p", &task);
                    assert_eq!(row["error_code"], 0, "{op:?} {place}: {row}\n{}", system.log());
                }
                let comes_back = op.is_none() || op == Some(RESTART);
                until(&format!("{op:?} {place}: the right number of processes"), || {
                    alive(&system).len() == if comes_back { 3 } else { 0 }
                });
                assert!(old.iter().all(|pid| !is_alive(*pid)), "{op:?} {place}\n{}", system.log());
                assert_eq!(lines(&system.path("starts")), if comes_back { 2 } else { 1 }, "{op:?} {place}");
            });
        }
    });
}

#[test]
fn a_handover_survives_a_kill_of_the_agent() {
    if !needs("haproxy") || !needs_root() {
        return;
    }
    for place in ["command-begun", "command-ended", "handed-over", "done"] {
        let mut system = System::new();
        let mut haproxy = haproxy(&system);
        let start = haproxy.spec["control"]["start_cmd"].as_str().expect("text").to_owned();
        haproxy.spec["control"]["start_cmd"] = json!(format!("echo start >> starts; {start}"));
        assert_eq!(system.operate("haproxy", START, &haproxy.spec).0, 0);
        let first = system.pid("haproxy").expect("a pid");
        system.kill_agent();
        system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
        until("it is held again", || system.process("haproxy")["agent"] == true);
        let task = system.begin("haproxy", RELOAD, &haproxy.spec);
        assert!(!system.agent.take().expect("it runs").wait().expect("it ends").success(), "{place}");
        system.start_agent();
        let row = system.row("haproxy", &task);
        assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
        until("the successor is held", || {
            system.pid("haproxy").is_some_and(|pid| pid != first && is_alive(pid))
        });
        until("the old one is gone", || !is_alive(first));
        assert_eq!(alive(&system), [system.pid("haproxy").expect("a pid")], "{place}");
        assert_eq!(lines(&system.path("starts")), 1, "{place}: {}", system.log());
        until("it serves", || get(haproxy.port).as_deref() == Some("served"));
    }
}

/// A binary upgrade that ends while no agent runs: the new master has neither the launch id nor a living ancestor.
#[test]
fn a_successor_that_took_over_without_an_agent_is_held() {
    if !needs("nginx") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let mut system = System::with_groups(groups);
        let nginx = nginx(&system);
        assert_eq!(system.operate("nginx", START, &nginx.spec).0, 0);
        let old = system.pid("nginx").expect("a pid");
        let named = || {
            let text = std::fs::read_to_string(system.path("run/nginx.pid")).unwrap_or_default();
            text.trim().parse::<u32>().ok().filter(|pid| *pid != old && is_alive(*pid))
        };
        kill(old, "USR2");
        until("the new master runs", || named().is_some());
        let new = named().expect("a pid");
        until("it has workers", || children(new) > 0);
        system.kill_agent();
        kill(old, "QUIT");
        until("the old master has ended", || !is_alive(old));
        restart_agent(&mut system, groups);
        until("the new master is held", || system.pid("nginx") == Some(new));
        until("it answers", || get(nginx.port).as_deref() == Some("one"));
        assert_eq!(system.operate("nginx", STOP, &nginx.spec).0, 0);
        assert_eq!(alive(&system), [0u32; 0], "groups: {groups}\n{}", system.log());
    }
}

fn children(pid: u32) -> usize {
    processes().into_iter().filter(|one| parent_of(*one) == Some(pid)).count()
}

#[test]
fn a_pid_that_should_have_stayed_is_reported() {
    let machine = crate::apply::Machine::new();
    let here = machine.path("");
    let here = here.display();
    let write = |config: &str| {
        let start = format!("sleep 1000 >/dev/null 2>&1 & echo $! > {here}/d.pid");
        let text = format!(
            "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: d}}\nhosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]\n\
             spec:\n  identity: {{proc_name: sleep, setup_path: {here}, pid_path: {here}/d.pid, config_path: {config}}}\n\
             \x20 control:\n    start_mode: daemon\n    start_cmd: {start}\n    reload_cmd: kill $ABIDE_PID; {start}\n\
             \x20 monitor_policy: {{auto_type: 1, start_check_secs: 2}}\n"
        );
        std::fs::write(machine.path("m/d.yaml"), text).expect("a file");
    };
    write("/etc/a");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    let first = machine.pids()["d"];
    write("/etc/b");
    let (code, out, err) = machine.apply(&[]);
    let second = machine.pids()["d"];
    assert!(code != 0 && format!("{out}{err}").contains("PidChanged"), "{code} {out}{err}");
    assert!(first != second && is_alive(second as u32) && !is_alive(first as u32));
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out}{err}");
}

/// CPU time of a process in seconds.
fn cpu_secs(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields = stat.rsplit_once(") ").expect("a name").1.split(' ').skip(11).take(2);
    let ticks: u64 = fields.map(|ticks| ticks.parse::<u64>().expect("a number")).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// A stop by an agent that did not launch the process scans all processes of the host. Stops at the same time share scans.
#[test]
fn many_stops_at_once_cost_few_scans_of_all_processes() {
    const COUNT: usize = 200;
    let mut system = System::new();
    let names: Vec<String> = (0..COUNT).map(|nth| format!("p{nth}")).collect();
    let spec = |name: &String| {
        let mut spec = system.spec(name, "exec sleep 1000");
        spec["monitor_policy"]["start_check_secs"] = json!(0);
        spec
    };
    let specs: Vec<Value> = names.iter().map(spec).collect();
    let operate_all = |system: &System, op: i64| {
        let tasks: Vec<Value> =
            names.iter().zip(&specs).map(|(name, spec)| system.begin(name, op, spec)).collect();
        for (name, task) in names.iter().zip(&tasks) {
            let row = system.row(name, task);
            assert_eq!(row["error_code"], 0, "{name}: {row}");
        }
    };
    operate_all(&system, START);
    system.kill_agent();
    system.start_agent();
    let agent = system.agent.as_ref().expect("an agent").id();
    let before = cpu_secs(agent);
    operate_all(&system, STOP);
    let spent = cpu_secs(agent) - before;
    // One scan for each of them would take a multiple of this.
    assert!(spent < 6.0, "{COUNT} stops took {spent} s of CPU time");
    assert!(names.iter().all(|name| system.pid(name).is_none()));
}

/// A kill of the tree stops the main process (SIGSTOP) first. An agent that is killed then leaves it stopped.
#[test]
fn a_stop_by_a_limit_survives_a_kill_of_the_agent() {
    if !needs_root() {
        return;
    }
    let mut system = System::with_groups(false);
    system.start_agent_without_groups_at("main-stopped");
    let mut spec = system.spec("p", "trap '' TERM; while :; do :; done");
    spec["resource"] = json!({"cpu": 0.5});
    spec["monitor_policy"]["stop_check_secs"] = json!(1);
    assert_eq!(system.operate("p", START, &spec).0, 0);
    let pid = system.pid("p").expect("it runs");
    until("the agent is killed", || {
        system.agent.as_mut().is_some_and(|agent| agent.try_wait().expect("a child").is_some())
    });
    // On a busy host, the signal takes effect a moment later.
    until("the process is stopped", || {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "))
    });
    system.disable_control_groups();
    let next = replaced(&system, "p", pid);
    assert!(!is_alive(pid), "the stopped process is ended\n{}", system.log());
    let history = system.process("p").to_string();
    assert!(history.contains("limit"), "{history}");
    assert!(is_alive(next) && system.operate("p", KILL, &spec).0 == 0 && !is_alive(next));
}
