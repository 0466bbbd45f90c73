//! Delivery to loopback receivers that answer, refuse and hang.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Instant;

use serde_json::Value;

use super::*;
use crate::control::ControllerEvent;
use crate::control::status::ControllerInfo;
use crate::control::testing::{pass_result, process};
use crate::http::WebhookClient;
use crate::model::Health;
use crate::store::Embedded;

/// A receiver: its status line, and the bodies that it got. Without a status line it hangs.
#[derive(Clone)]
struct Server {
    url: String,
    status: Arc<Mutex<&'static str>>,
    bodies: Arc<Mutex<Vec<Value>>>,
}

impl Server {
    fn start(status: &'static str) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let server = Server { url, status: Arc::new(Mutex::new(status)), bodies: Arc::default() };
        let shared = server.clone();
        std::thread::spawn(move || {
            let mut open = Vec::new();
            for mut stream in listener.incoming().flatten() {
                let mut bytes = Vec::new();
                let mut part = [0; 65_536];
                let body = loop {
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    if let Some((head, body)) = text.split_once("\r\n\r\n") {
                        let length = head.to_ascii_lowercase();
                        let length = length.lines().find_map(|line| line.strip_prefix("content-length: "));
                        let length: usize = length.expect("a length").trim().parse().expect("a number");
                        if body.len() >= length {
                            break body.to_owned();
                        }
                    }
                    match stream.read(&mut part) {
                        Ok(n @ 1..) => bytes.extend_from_slice(&part[..n]),
                        Ok(0) | Err(_) => return,
                    }
                };
                let status = *shared.status.lock().expect("a lock");
                if status.starts_with('2') {
                    shared.bodies.lock().expect("a lock").push(serde_json::from_str(&body).expect("JSON"));
                }
                match status {
                    "" => open.push(stream),
                    status => {
                        let _ = write!(
                            stream,
                            "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                        );
                    }
                }
            }
        });
        server
    }

    fn bodies(&self) -> Vec<Value> {
        self.bodies.lock().expect("a lock").clone()
    }

    /// Number of incidents by status.
    fn told(&self, status: &str) -> u64 {
        let bodies = self.bodies();
        let of_status = bodies.iter().filter(|body| body["status"] == status);
        of_status.map(|body| body["total"].as_u64().expect("a number")).sum()
    }

    fn route(&self, name: &str) -> AlertRoute {
        let client = WebhookClient::new(&self.url, false).expect("an address");
        route(name, AlertReceiver::Webhook { client, template: None, signature: None })
    }
}

fn route(name: &str, receiver: AlertReceiver) -> AlertRoute {
    let soon = Duration::from_millis(1);
    let rules = RouteRules { wait: soon, settle: soon, interval: soon, ..RouteRules::default() };
    AlertRoute { name: name.to_owned(), receiver, rules, timeout: Duration::from_millis(500) }
}

/// A controller with two processes.
struct Controller {
    board: Arc<StatusBoard>,
    feed: Arc<AlertFeed>,
    deliveries: Arc<DeliveryBoard>,
    state: Embedded,
    folder: tempfile::TempDir,
}

impl Controller {
    fn new() -> Controller {
        let info = ControllerInfo { owner: "shop".to_owned(), ..ControllerInfo::default() };
        let folder = tempfile::tempdir().expect("a folder");
        Controller {
            board: Arc::new(StatusBoard::new(info)),
            feed: Arc::default(),
            deliveries: Arc::default(),
            state: Embedded::open(&folder.path().join("state.db")).expect("a store"),
            folder,
        }
    }

    fn start(&self, routes: Vec<AlertRoute>) -> RunningAlerts {
        start(routes, self.state.clone(), &self.board, &self.feed, &self.deliveries)
    }

    fn lead(&self) {
        self.board.record(&ControllerEvent::Leading { generation: 1 });
    }

    /// Observes: these processes are unhealthy.
    fn observe(&self, ill: &[&str]) {
        let manifests = process("a", 1) + &process("b", 1);
        let result = pass_result(&manifests, |observed| {
            for (key, seen) in &mut observed.instances {
                if ill.contains(&key.name.as_str()) {
                    seen.health = Health::Degraded;
                }
            }
        });
        let event = ControllerEvent::Planned { result: &result };
        self.board.record(&event);
        self.feed.record(&event);
    }

    /// Observes until a condition holds.
    async fn observe_until(&self, ill: &[&str], what: &str, mut condition: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !condition() {
            assert!(begin.elapsed() < Duration::from_secs(60), "not within 60 s: {what}");
            self.observe(ill);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn status(&self, route: &str) -> AlertRouteStatus {
        self.deliveries.list().into_iter().find(|one| one.route == route).unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_leader_sends_and_a_restart_sends_nothing_again() {
    let (controller, server) = (Controller::new(), Server::start("200 OK"));
    let alerts = controller.start(vec![server.route("ops")]);
    controller.observe(&["a"]);
    tokio::time::sleep(2 * EVALUATION_INTERVAL).await;
    assert!(server.bodies().is_empty(), "it does not lead");
    controller.lead();
    controller.observe_until(&["a"], "a message", || server.told("firing") == 1).await;
    controller.observe_until(&["a"], "an open incident", || controller.status("ops").open == 1).await;
    alerts.stop().await;
    let alerts = controller.start(vec![server.route("ops")]);
    controller.observe_until(&["a", "b"], "the new incident", || server.told("firing") >= 2).await;
    controller.observe_until(&[], "both recoveries", || server.told("resolved") == 2).await;
    assert_eq!(server.told("firing"), 2, "{:?}", server.bodies());
    controller.observe_until(&[], "no open incident", || controller.status("ops").open == 0).await;
    // A recovery is stored after it was sent.
    let begin = Instant::now();
    while !sent_incidents::read(&controller.state, "shop", "ops").await.expect("a store").is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the incidents stay stored");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    alerts.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_hangs_or_fails_delays_no_other() {
    let controller = Controller::new();
    let [good, bad, hanging] = ["200 OK", "500 Internal Server Error", ""].map(Server::start);
    let alerts = controller.start(vec![good.route("good"), bad.route("bad"), hanging.route("hanging")]);
    controller.lead();
    controller.observe_until(&["a"], "the good one", || good.told("firing") == 1).await;
    let fails = |route: &str| controller.status(route).failed > 0;
    controller.observe_until(&["a"], "failures", || fails("bad") && fails("hanging")).await;
    let failures = controller.deliveries.failures().borrow().clone();
    assert!(failures.len() == 2 && failures[0].starts_with("bad: HTTP 500"), "{failures:?}");
    let metrics = controller.deliveries.metrics_text();
    for line in [
        "abide_notify_failing{route=\"bad\"} 1",
        "abide_notify_failing{route=\"good\"} 0",
        "abide_alerts{kind=\"unhealthy\",severity=\"error\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    *bad.status.lock().expect("a lock") = "200 OK";
    controller.observe_until(&["a"], "the delivery", || bad.told("firing") == 1).await;
    controller.observe_until(&["a"], "no error", || controller.status("bad").error.is_none()).await;
    // What ended before it could be sent is not sent.
    controller.observe_until(&[], "recoveries", || good.told("resolved") == 1).await;
    *hanging.status.lock().expect("a lock") = "200 OK";
    controller.observe_until(&["b"], "the next incident", || hanging.told("firing") == 1).await;
    assert!(hanging.bodies()[0]["title"].as_str().expect("a title").contains("web/b"));
    alerts.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_and_alertmanager_get_messages() {
    let (controller, manager) = (Controller::new(), Server::start("200 OK"));
    let file = controller.folder.path().join("messages");
    let script = format!("cat >> {}", file.display());
    let command = AlertReceiver::Command(["sh", "-c", &script].map(str::to_owned).to_vec());
    let client = WebhookClient::new(&manager.url, false).expect("an address");
    let alerts = controller
        .start(vec![route("program", command), route("manager", AlertReceiver::Alertmanager(client))]);
    controller.lead();
    let messages = || std::fs::read_to_string(&file).unwrap_or_default();
    controller.observe_until(&["a"], "the input", || messages().contains("\"firing\"")).await;
    controller.observe_until(&["a"], "the alert", || !manager.bodies().is_empty()).await;
    let alert = manager.bodies()[0][0].clone();
    assert_eq!(alert["labels"]["alertname"], "AbideUnhealthy");
    assert_eq!((&alert["labels"]["owner"], &alert["labels"]["process"]), (&"shop".into(), &"web/a".into()));
    let ended = || {
        let last = manager.bodies().last().cloned().expect("an alert");
        last[0]["endsAt"].as_str() <= Some(clock::now().to_string().as_str())
    };
    controller.observe_until(&[], "its end", ended).await;
    controller.observe_until(&[], "the recovery", || messages().contains("\"resolved\"")).await;
    alerts.stop().await;
}
