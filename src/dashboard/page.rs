//! The page: how everything stands, for people. One document that needs nothing from elsewhere.
//!
//! It is written here, whole, with everything escaped; its script only fetches it again when an event says that something
//! happened. So it is as true without the script, only not by itself.

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;

use super::api::{converged, health_of, hosting_of};
use super::redact::View;
use super::typed_response;
use crate::clock;
use crate::control::status::{
    ControllerStatus, HIDDEN, LogEntry, LogLevel, Role, Row, Severity, StatusBoard, SyncStatus, may_quote,
};
use crate::escape;
use crate::model::{Health, Time, span};

/// So many processes are shown: those first that somebody should look at.
const ROWS: usize = 500;
const EVENTS: u64 = 40;

/// `can_log_in`: a token exists.
pub fn page(board: &StatusBoard, view: View, can_log_in: bool) -> Response {
    // Only what stands in this very answer may run and style.
    let nonce = format!("{:016x}{:016x}", RandomState::new().hash_one(1), RandomState::new().hash_one(2));
    let known = board.status();
    let mut main = String::new();
    summary(&mut main, board, &known);
    problems(&mut main, &known, view);
    processes(&mut main, &known);
    events(&mut main, board, &known, view);
    let title = match (&known.trouble, converged(&known)) {
        (Some(_), _) => "trouble",
        (None, true) => "converged",
        (None, false) => "not converged",
    };
    // Without the token, commands and environment values are hidden.
    let login = match (view, can_log_in) {
        (View::Full, _) => "",
        (View::Redacted, false) => "· commands and environment values are hidden ",
        (View::Redacted, true) => {
            "· commands and environment values are hidden: <a href=\"/login\">log in</a> "
        }
    };
    let html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>abide: {title}</title>\n<style nonce=\"{nonce}\">{STYLE}</style>\n\
         </head>\n<body>\n<main id=\"main\" data-last=\"{}\">\n{main}</main>\n<footer>abide {} · <a href=\"/api/v1/status\">status</a> · \
         <a href=\"/api/v1/processes\">processes</a> · <a href=\"/api/v1/plan\">plan</a> · <a href=\"/api/v1/history\">history</a> · \
         <a href=\"/metrics\">metrics</a> {login}<span id=\"live\"></span></footer>\n<script nonce=\"{nonce}\">{SCRIPT}</script>\n</body>\n</html>\n",
        known.number,
        env!("CARGO_PKG_VERSION"),
    );
    let mut response = typed_response(Body::from(html), "text/html; charset=utf-8");
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}

fn summary(out: &mut String, board: &StatusBoard, known: &ControllerStatus) {
    let subject = &board.subject;
    let (class, word) = match (&known.trouble, &known.last_pass) {
        (Some(_), _) => ("bad", "trouble"),
        (None, None) => ("dull", "not looked yet"),
        (None, Some(_)) if known.in_flight > 0 => ("busy", "working"),
        (None, Some(_)) if converged(known) => ("good", "converged"),
        (None, Some(_)) => ("warn", "not converged"),
    };
    let _ = write!(
        out,
        "<header><h1>{}</h1> <span class=\"badge {class}\">{word}</span></header>\n<dl class=\"facts\">",
        escape::html(&format!("{} / {}", subject.target, subject.owner))
    );
    let role = match &known.role {
        Role::Starting => "starting".to_owned(),
        Role::Waiting { host, pid } => format!("waits: {host} (process {pid}) leads"),
        Role::Leading { generation } => format!("leads (generation {generation})"),
    };
    let revision: String = known.revision.chars().take(12).collect();
    let looked = known.last_pass.as_ref().map_or("never".to_owned(), |look| ago(look.observed.at));
    let pass = known.pass_duration.map_or("none yet".to_owned(), |took| format!("{} ms", took.as_millis()));
    let paused: Vec<String> = known
        .last_pass
        .iter()
        .flat_map(|look| &look.rules.pauses)
        .map(|pause| pause.namespace.as_ref().map_or("everything".to_owned(), ToString::to_string))
        .collect();
    let mut facts = vec![
        ("role", role),
        ("source", subject.sources.join(", ")),
        ("revision", format!("{revision} ({} files)", known.files)),
        ("last look", looked),
        ("last pass", pass),
        ("queue", known.queue.to_string()),
    ];
    if let Some(commit) = &known.commit {
        facts.insert(2, ("commit", commit.chars().take(12).collect()));
    }
    if !paused.is_empty() {
        facts.push(("paused", paused.join(", ")));
    }
    for (name, value) in facts {
        let _ = write!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", escape::html(&value));
    }
    out.push_str("</dl>\n");
    for trouble in known.trouble.iter().chain(&known.not_followed) {
        let _ = writeln!(out, "<p class=\"box bad\">{}</p>", escape::html(trouble));
    }
    out.push_str("<p class=\"counts\">");
    for sync in SyncStatus::ALL {
        let many = known.rows().iter().filter(|row| row.sync == sync).count();
        if many > 0 {
            let _ = write!(out, "<span class=\"badge {}\">{many} {}</span> ", class_of(sync), sync.word());
        }
    }
    for health in [Health::Degraded, Health::Failed, Health::Starting] {
        let many = known.rows().iter().filter(|row| health_of(row) == health).count();
        if many > 0 {
            let _ = write!(
                out,
                "<span class=\"badge {}\">{many} {}</span> ",
                health_class(health),
                health.word()
            );
        }
    }
    out.push_str("</p>\n");
}

fn problems(out: &mut String, known: &ControllerStatus, view: View) {
    if known.problems.is_empty() {
        return;
    }
    out.push_str("<h2>Problems in the manifests</h2>\n<ul class=\"problems\">\n");
    for problem in known.problems.iter().take(ROWS) {
        let class = if problem.severity == Severity::Error { "bad" } else { "warn" };
        let quotes = may_quote(&problem.message) || problem.hint.as_deref().is_some_and(may_quote);
        let is_hidden = view == View::Redacted && quotes;
        let message = if is_hidden { HIDDEN } else { &problem.message };
        let place = format!("{}:{}:{}", problem.file, problem.line, problem.column);
        let hint = problem
            .hint
            .as_deref()
            .filter(|_| !is_hidden)
            .map(|hint| format!(" <small>{}</small>", escape::html(hint)))
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "<li class=\"box {class}\"><code>{}</code> {}{hint}</li>",
            escape::html(&place),
            escape::html(message)
        );
    }
    out.push_str("</ul>\n");
}

fn processes(out: &mut String, known: &ControllerStatus) {
    let mut rows: Vec<&Row> = known.rows().iter().collect();
    let calm = |row: &Row| {
        row.sync == SyncStatus::InSync
            && !matches!(health_of(row), Health::Failed | Health::Degraded | Health::Unknown)
    };
    rows.sort_by_key(|row| calm(row));
    out.push_str("<h2>Processes</h2>\n");
    if rows.is_empty() {
        out.push_str("<p class=\"dull\">Nothing is wanted, and nothing was seen.</p>\n");
        return;
    }
    out.push_str(
        "<table><thead><tr><th>process</th><th>host</th><th>sync</th><th>health</th><th>hosting</th><th>pid</th><th>why</th></tr></thead>\n<tbody>\n",
    );
    for row in rows.iter().take(ROWS) {
        process(out, row);
    }
    out.push_str("</tbody></table>\n");
    if rows.len() > ROWS {
        let more = rows.len() - ROWS;
        let _ = writeln!(
            out,
            "<p class=\"dull\">and {more} more: <a href=\"/api/v1/processes\">all of them</a></p>"
        );
    }
}

fn process(out: &mut String, row: &Row) {
    let health = health_of(row);
    let running = row.seen.as_ref().and_then(|seen| seen.running).filter(|_| row.gap.is_none());
    let pid = row.seen.as_ref().and_then(|seen| seen.pid).filter(|_| row.gap.is_none());
    let pid = match (running, pid) {
        (Some(true), Some(pid)) => pid.to_string(),
        (Some(true), None) => "runs".to_owned(),
        (Some(false), _) => "not running".to_owned(),
        (None, _) if row.seen.is_none() && row.gap.is_none() => "not there".to_owned(),
        (None, _) => "?".to_owned(),
    };
    let why = match (&row.held, &row.gap) {
        (Some((reason, detail)), _) => format!("<b>{}</b> {}", reason.word(), escape::html(detail)),
        (None, Some(gap)) => escape::html(gap),
        (None, None) => {
            row.declared.as_deref().map(|at| format!("<code>{}</code>", escape::html(at))).unwrap_or_default()
        }
    };
    // One piece, also where the cell is laid out piece by piece.
    let why = if why.is_empty() { why } else { format!("<div>{why}</div>") };
    let _ = writeln!(
        out,
        "<tr><td data-l=\"process\"><b>{}</b></td><td data-l=\"host\">{}</td><td data-l=\"sync\"><span class=\"badge {}\">{}</span></td>\
         <td data-l=\"health\"><span class=\"badge {}\">{}</span></td><td data-l=\"hosting\">{}</td><td data-l=\"pid\">{pid}</td>\
         <td data-l=\"why\">{why}</td></tr>",
        escape::html(&row.key.process().to_string()),
        escape::html(&row.key.host.to_string()),
        class_of(row.sync),
        row.sync.word(),
        health_class(health),
        health.word(),
        hosting_of(row),
    );
}

fn events(out: &mut String, board: &StatusBoard, known: &ControllerStatus, view: View) {
    out.push_str("<h2>Events</h2>\n<ol class=\"events\">\n");
    let later = board.entries_after(known.number.saturating_sub(EVENTS), usize::MAX);
    let shown = later.notes.iter().rev().map(|note| match view {
        View::Full => LogEntry::clone(note),
        View::Redacted => note.redacted(),
    });
    for note in shown {
        let class = match note.level {
            LogLevel::Info => "",
            LogLevel::Warning => "warn",
            LogLevel::Error => "bad",
        };
        let text = match note.text.as_str() {
            "" => String::new(),
            text => format!("<pre>{}</pre>", escape::html(text)),
        };
        let _ = writeln!(
            out,
            "<li class=\"{class}\"><time>{}</time> <i>{}</i> {}{text}</li>",
            note.at,
            note.kind.word(),
            escape::html(&note.title)
        );
    }
    out.push_str("</ol>\n");
}

fn class_of(sync: SyncStatus) -> &'static str {
    match sync {
        SyncStatus::InSync => "good",
        SyncStatus::OutOfSync => "busy",
        SyncStatus::Held | SyncStatus::Paused | SyncStatus::Orphan => "warn",
        SyncStatus::Unknown => "dull",
    }
}

fn health_class(health: Health) -> &'static str {
    match health {
        Health::Healthy => "good",
        Health::Starting => "busy",
        Health::Degraded => "warn",
        Health::Failed => "bad",
        Health::Unknown | Health::NotReported => "dull",
    }
}

fn ago(at: Time) -> String {
    format!("{at}, {} ago", span(clock::now().secs_since(at)))
}

const STYLE: &str = r#"
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--dim:#667079;--line:#dfe3e6;--soft:#f5f7f8;--good:#18794e;--warn:#946800;--bad:#cd2b31;--busy:#0b68cb}
@media(prefers-color-scheme:dark){:root{--bg:#15181b;--fg:#e6e9eb;--dim:#98a1a9;--line:#2e3438;--soft:#1d2125;--good:#4cc38a;--warn:#f1a10d;--bad:#ff6369;--busy:#52a9ff}}
*{box-sizing:border-box}body{margin:0 auto;max-width:75rem;padding:1rem;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif;overflow-wrap:break-word}
header{display:flex;gap:.75rem;align-items:center;flex-wrap:wrap}h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}
.facts{display:flex;flex-wrap:wrap;gap:.4rem 2rem;margin:.8rem 0}dt{color:var(--dim);font-size:.8rem}dd{margin:0}
.badge{display:inline-block;border:1px solid currentColor;border-radius:1rem;padding:0 .55rem;font-size:.82rem;white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}.busy{color:var(--busy)}.dull{color:var(--dim)}
.box{border-left:4px solid;padding:.35rem .7rem;background:var(--soft);margin:.4rem 0}.problems{list-style:none;padding:0;margin:0}
small{display:block;color:var(--dim)}code,pre,time{font:.85em ui-monospace,monospace}pre{margin:.2rem 0 .2rem 1rem;white-space:pre-wrap}
table{width:100%;border-collapse:collapse}th{text-align:left;color:var(--dim);font-weight:500;font-size:.82rem}th,td{padding:.35rem .6rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
.events{list-style:none;padding:0;margin:0}.events li{padding:.2rem 0;border-bottom:1px solid var(--line)}time{color:var(--dim)}i{color:var(--dim);font-style:normal}
footer{margin-top:2rem;color:var(--dim);font-size:.85rem}a{color:var(--busy)}
@media(max-width:44rem){thead{display:none}tr{display:block;padding:.5rem 0;border-bottom:1px solid var(--line)}td{display:flex;gap:.75rem;border:0;padding:.1rem 0}td::before{content:attr(data-l);color:var(--dim);font-size:.82rem;flex:0 0 4.5rem}td:empty{display:none}}
"#;

const SCRIPT: &str = r#"
(() => {
  const live = document.getElementById('live');
  const say = (text) => { live.textContent = '· ' + text; };
  let timer = null, again = false;
  const refresh = async () => {
    try {
      const answer = await fetch('/', { cache: 'no-store' });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      document.getElementById('main').replaceWith(document.adoptNode(page.getElementById('main')));
      document.title = page.title;
    } catch (error) { say('cannot be reached'); }
    timer = null;
    if (again) { again = false; soon(); }
  };
  const soon = () => { if (timer) { again = true; } else { timer = setTimeout(refresh, 250); } };
  const last = document.getElementById('main').dataset.last;
  const source = new EventSource('/api/v1/events?after=' + last);
  source.onopen = () => say('live');
  source.onmessage = soon;
  source.addEventListener('missed', soon);
  source.onerror = () => say('connecting');
  setInterval(soon, 30000);
})();
"#;
