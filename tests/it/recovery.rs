//! Recovery of interrupted runs: the next run determines the result of every call in flight.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use abide::backend::{Abide, Backend, Operation, PriorOwnership, Scope};
use abide::execute::journal::{self, Call, Journal, JournaledStep};
use abide::execute::recover;
use abide::http::{ApiCredentials, ApiEndpoint, ClientConfig};
use abide::model::{HashedSpec, Host, InstanceKey, Op};
use abide::reconcile::Caps;
use abide::store::Embedded;
use serde_json::json;
use tokio::time::Instant;

use crate::system::{HOST, System};

fn key(name: &str) -> InstanceKey {
    format!("{HOST}:web:{name}").parse().expect("a key")
}

fn order(id: &str, op: Op, name: &str, spec: Option<&Arc<HashedSpec>>, from: Option<&str>) -> Operation {
    let instance = key(name);
    let host = Host { key: instance.host.clone(), supplier: None, agent_id: None };
    let (id, owner, from) = (id.to_owned(), Some("team".to_owned()), from.map(key));
    let (spec, revision, takes) = (spec.cloned(), None, Vec::new());
    Operation {
        id,
        owner,
        instance,
        host,
        op,
        spec,
        revision,
        reloaded_fields: takes,
        from,
        before: PriorOwnership { registered: true, owned: true },
        origin: None,
        protections: Vec::new(),
    }
}

/// A controller that is killed while the gateway stores its request: the agent receives the request.
#[test]
fn a_call_of_a_dead_caller_is_completed() {
    let system = System::new();
    assert_eq!(system.operate("p", 0, &system.spec("p", "exec sleep 1000")).0, 0);
    // A caller hangs up later after one that came too early, and earlier after one that was taken on: about the moment
    // at which the gateway takes a call on, however busy this machine is.
    let mut patience = Duration::from_micros(500);
    let mut taken_on = 0;
    for nth in 0..300_u64 {
        let body = json!({"bk_app_code": "all", "bk_app_secret": "s3cret", "meta": {"namespace": "web", "name": "p"},
                          "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "op_type": if nth % 2 == 0 { 4 } else { 3 }});
        let body = body.to_string();
        let mut stream = system.server.connect();
        write!(
            stream,
            "POST /api/c/compapi/v2/gse/operate_proc/ HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\nX-Abide-Op: gone-{nth}\r\n\r\n{body}",
            body.len()
        )
        .expect("a request");
        std::thread::sleep(patience);
        drop(stream);
        let found = system.server.call("GET", &format!("/api/abide/v1/tasks?op=gone-{nth}"), json!({}));
        if found["data"]["task"].is_string() {
            system.row("p", &found["data"]["task"]);
            taken_on += 1;
            patience = patience * 4 / 5;
        } else {
            patience = (patience * 5 / 4).min(Duration::from_millis(50));
        }
    }
    assert!(taken_on > 10, "{taken_on} of 300 were taken on");
}

/// A call of ours may register some, rename some and stop others: only the last two have a task to wait for.
#[test]
fn a_call_with_many_kinds_is_recovered() {
    let system = System::new();
    tokio::runtime::Runtime::new().expect("a runtime").block_on(many_kinds(&system));
}

async fn many_kinds(system: &System) {
    for name in ["p", "q", "r"] {
        assert_eq!(system.operate(name, 0, &system.spec(name, "exec sleep 1000")).0, 0);
    }
    let access = ApiEndpoint {
        url: format!("http://{}", system.server.address),
        credentials: ApiCredentials::App { code: "all".into(), secret: "s3cret".into(), username: None },
        client_config: ClientConfig::default(),
    };
    let backend = Abide::new(&access).expect("a client");
    let seen = backend.observe(&Scope::default()).await.expect("a look");
    let spec = |name: &str| seen.instances[&key(name)].specs.registered.spec();
    let all = [
        order("1", Op::Register, "p", spec("p"), None),
        order("2", Op::Stop, "q", spec("q"), None),
        order("3", Op::Register, "s", spec("r"), Some("r")),
    ];
    let store = Embedded::open(&system.path("state.db")).expect("a store");
    // Together, each by itself, and what was never sent.
    for (nth, (orders, is_sent)) in
        [(&all[..], true), (&all[..1], true), (&all[1..2], true), (&all[..], false)].into_iter().enumerate()
    {
        let began = |order: &Operation| JournaledStep {
            instance: order.instance.clone(),
            op: order.op,
            moves: order.moves(),
            revision: None,
            spec: None,
            supplier: None,
            agent_id: None,
            hosted: false,
            pid: None,
            owned: false,
        };
        let run = format!("run-{nth}");
        let call = Call { steps: orders.iter().map(began).collect(), ..Call::default() };
        let name = Journal::new(&store, "team", &run).begin(&call).await.expect("it is written");
        if is_sent {
            backend.submit(&name, orders).await.expect("it is taken on");
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        let left = journal::unfinished(&store, "team").await.expect("a store");
        let settled = recover(&backend, &store, ("it", &Caps::LOCAL), "team", left, deadline).await;
        assert!(settled.is_ok(), "{nth}: {settled:?}");
        assert!(journal::unfinished(&store, "team").await.expect("a store").is_empty(), "{nth}");
        if nth == 0 {
            // It was waited for.
            assert_eq!((system.pid("q"), system.process("s")["running"].as_bool()), (None, Some(true)));
        }
    }
}
