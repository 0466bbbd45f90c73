//! Planner benchmark: `reconcile` over fleets of up to a million instances, and `abide plan` compared with
//! `abide validate`.
//!
//! `cargo bench --bench plan` prints, for fleets in which instances share the spec of their process (100 hosts per
//! process) and for fleets in which every instance has its own: the best of several runs with nothing to do, and with
//! 1 % changed, with observed specs or with digests only; all on one core. Then the whole program, as a
//! user runs it, over 10,000 processes in one file and as many rows.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use abide::model::{
    DeclaredProcess, Desired, DesiredInstance, HashedSpec, Host, InstanceKey, KnownSpec, LastRun, Now,
    Observed, ObservedInstance, ObservedSpecs, Rule, SourceLocation, Spec, State,
};
use abide::reconcile::{Caps, Rules, reconcile, revision};

const RUNS: usize = 7;

fn main() {
    println!("reconcile, one core, best of {RUNS} runs");
    println!("{:>9}  {:<9} {:<8} {:>12} {:>12}", "instances", "specs", "known by", "nothing", "1 % changed");
    for instances in [10_000, 100_000, 1_000_000] {
        for (specs, a_process) in [("shared", 100), ("own", 1)] {
            for (by, digests) in [("spec", false), ("digests", true)] {
                let nothing = measure(instances, a_process, digests, 0);
                let some = measure(instances, a_process, digests, 100);
                println!("{instances:>9}  {specs:<9} {by:<8} {nothing:>12.1?} {some:>12.1?}");
            }
        }
    }
    whole_program();
}

/// `changed`: every so manieth instance differs; 0: none.
fn measure(instances: usize, a_process: usize, digests: bool, changed: usize) -> Duration {
    let (desired, observed) = fleet(instances, a_process, digests, changed);
    let rules = Rules::new(Caps::LOCAL);
    let once = || {
        let begin = Instant::now();
        let plan = reconcile(&desired, &observed, &rules, &Now::default());
        let took = begin.elapsed();
        let expected = instances.checked_div(changed).unwrap_or(0);
        assert_eq!((plan.steps().count(), plan.held.len()), (expected, 0));
        assert!(plan.steps().all(|step| matches!(step.why[0].rule, Rule::LiveDiffers | Rule::SpecUnknown)));
        took
    };
    (0..RUNS).map(|_| once()).min().unwrap_or_default()
}

fn fleet(instances: usize, a_process: usize, digests: bool, changed: usize) -> (Desired, Observed) {
    let (mut wants, mut rows) = (Vec::with_capacity(instances), Vec::with_capacity(instances));
    for process in 0..instances / a_process {
        let (new, same) = (stamped(process, "./run"), stamped(process, "./run"));
        let old = stamped(process, "./run --old");
        let version = |spec: &Arc<HashedSpec>| match digests {
            true => KnownSpec::Digests(revision(spec, &Default::default())),
            false => KnownSpec::Full(Arc::clone(spec)),
        };
        let (same, old) = (version(&same), version(&old));
        let origin = origin(process);
        for nth in 0..a_process {
            let number = process * a_process + nth;
            let key = key(if a_process == 1 { number % 1000 } else { nth }, process);
            let differs = changed > 0 && number.is_multiple_of(changed);
            let known = if differs { &old } else { &same };
            let seen = ObservedInstance {
                registered: Some(true),
                hosted: Some(true),
                running: Some(true),
                owner: Some("default".into()),
                specs: ObservedSpecs {
                    registered: known.clone(),
                    live: known.clone(),
                    ran: LastRun::Never,
                    ..ObservedSpecs::default()
                },
                ..ObservedInstance::default()
            };
            rows.push((key.clone(), seen));
            let host = Host { key: key.host.clone(), supplier: None, agent_id: None };
            wants.push((key, DesiredInstance { host, spec: Arc::clone(&new), origin: Arc::clone(&origin) }));
        }
    }
    // Maps are made of sorted lists at once, as they are when manifests and rows are read.
    let desired = Desired { instances: wants.into_iter().collect(), ..Desired::default() };
    (desired, Observed { instances: rows.into_iter().collect(), ..Observed::default() })
}

fn key(host: usize, process: usize) -> InstanceKey {
    let text = format!("0:10.{}.{}.{}:web:proc-{process}", host / 65_536, host / 256 % 256, host % 256);
    text.parse().expect("a key")
}

fn origin(process: usize) -> Arc<DeclaredProcess> {
    Arc::new(DeclaredProcess {
        place: SourceLocation { file: "fleet.yaml".into(), line: process as u32 + 1, column: 1 },
        declared: format!("web/proc-{process}").parse().expect("a name"),
        state: State::Running,
        depends_on: Vec::new(),
        protect: Vec::new(),
        adopt: false,
        moved_from: Vec::new(),
        on_change: Default::default(),
        rollout: None,
        policies: Vec::new(),
    })
}

fn stamped(process: usize, start: &str) -> Arc<HashedSpec> {
    Arc::new(HashedSpec::new(spec(process, start)))
}

fn spec(process: usize, start: &str) -> Spec {
    let mut spec = Spec::default();
    spec.identity.proc_name = format!("proc-{process}");
    spec.identity.setup_path = format!("/opt/proc-{process}");
    spec.identity.pid_path = format!("/run/proc-{process}.pid");
    spec.identity.user = Some("app".into());
    spec.control.start_cmd = Some(start.into());
    spec.control.stop_cmd = Some("./stop".into());
    spec.control.reload_cmd = Some("./reload".into());
    spec.labels = [("tier".to_owned(), "front".to_owned()), ("team".to_owned(), "shop".to_owned())].into();
    spec
}

const PROCESSES: usize = 10_000;

/// The program as a user runs it, over the same file.
fn whole_program() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (manifest, rows) = (folder.path().join("fleet.yaml"), folder.path().join("rows.json"));
    let (mut text, mut seen) = (String::new(), String::from("["));
    for nth in 0..PROCESSES {
        let _ = write!(
            text,
            "---\napiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: proc-{nth}}}\n"
        );
        let _ = write!(text, "hosts:\n  - {{ip: 10.0.{}.{}, bk_cloud_id: 0}}\nspec:\n", nth / 250, nth % 250);
        let _ = write!(text, "  identity:\n    proc_name: proc-{nth}\n    setup_path: /opt/proc-{nth}\n");
        let _ = write!(
            text,
            "    pid_path: /run/proc-{nth}.pid\n    user: app\n  control:\n    start_cmd: ./run\n"
        );
        let _ = write!(
            text,
            "    stop_cmd: ./stop\n    reload_cmd: ./reload\n  monitor_policy:\n    auto_type: 1\n"
        );
        let comma = if nth == 0 { "" } else { "," };
        let facts = "\"registered\":true,\"hosted\":true,\"running\":true,\"owner\":\"default\"";
        // One in a hundred is not as wanted.
        let start = if nth % 100 == 0 { "./run --old" } else { "./run" };
        let identity = format!(
            "{{\"proc_name\":\"proc-{nth}\",\"setup_path\":\"/opt/proc-{nth}\",\"pid_path\":\"/run/proc-{nth}.pid\",\"user\":\"app\"}}"
        );
        let control =
            format!("{{\"start_cmd\":\"{start}\",\"stop_cmd\":\"./stop\",\"reload_cmd\":\"./reload\"}}");
        let host = format!("0:10.0.{}.{}", nth / 250, nth % 250);
        let _ = write!(
            seen,
            "{comma}\n{{\"instance\":\"{host}:web:proc-{nth}\",{facts},\"spec\":{{\"identity\":{identity},\"control\":{control}}}}}"
        );
    }
    seen.push_str("\n]\n");
    std::fs::write(&manifest, &text).expect("a file");
    std::fs::write(&rows, &seen).expect("a file");
    let path = |path: &Path| path.display().to_string();
    let validate = vec!["validate".to_owned(), path(&manifest)];
    let plan = vec!["plan".to_owned(), path(&manifest), "--observed".to_owned(), path(&rows)];
    let json = [plan.clone(), vec!["-o".to_owned(), "json".to_owned()]].concat();
    let first = [vec!["plan".to_owned(), path(&manifest)], vec!["-o".to_owned(), "json".to_owned()]].concat();
    println!(
        "\nthe program, {PROCESSES} processes, {:.1} MB, median of {TURNS} runs in turns",
        text.len() as f64 / 1e6
    );
    let others = [
        ("plan, 1 % changed", &plan),
        ("plan, 1 % changed, json", &json),
        ("plan, all to start, json", &first),
    ];
    // In turns, so that a machine that is busy for a while slows all of them; and medians, since one lucky run is none.
    let mut alone = Vec::new();
    let mut took: Vec<Vec<Duration>> = vec![Vec::new(); others.len()];
    for _ in 0..TURNS {
        alone.push(program(&validate));
        for (times, (_, args)) in took.iter_mut().zip(&others) {
            times.push(program(args));
        }
    }
    let alone = median(alone);
    println!("validate                            {alone:>9.1?}");
    for (times, (name, _)) in took.into_iter().zip(&others) {
        let took = median(times);
        println!("{name:<35} {took:>9.1?}   {:.2}x", took.as_secs_f64() / alone.as_secs_f64());
    }
}

const TURNS: usize = 15;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn program(args: &[String]) -> Duration {
    let begin = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_abide")).args(args).output().expect("it runs");
    let took = begin.elapsed();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    took
}
