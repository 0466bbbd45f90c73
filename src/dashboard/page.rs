//! Status page: one self-contained HTML document, rendered on the server.
//!
//! All values are escaped. The script only fetches the page again on events, so the page is complete without it.

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;

use super::api::{converged, health_of, hosting_of};
use super::redact::View;
use super::reply::typed_response;
use super::viewer::Viewer;
use crate::access::AccessRole;
use crate::clock;
use crate::control::status::{
    ControllerStatus, HIDDEN, LogLevel, Role, Row, Severity, StatusBoard, SyncStatus, may_quote,
};
use crate::escape;
use crate::model::{Health, Time, count, span};

/// Maximum listed processes; those that need attention come first.
const ROWS: usize = 500;
const EVENTS: u64 = 40;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// A browser omits the cookie of a session when a link of another site opens the page.
const LOGIN_SCRIPT: &str = "fetch('/api/v1/session', { headers: { 'X-Abide-Background': '1' } })\n  \
    .then((answer) => { if (answer.ok) location.replace('/'); }, () => {});\n";

/// PageAccount of the reader.
pub enum PageAccount {
    /// No token exists.
    Nothing,
    /// A token exists.
    CanLogIn,
    /// A person; `csrf`: of the session.
    Person { name: String, role: AccessRole, csrf: Option<String> },
}

/// Restricts scripts and styles to those of this response.
fn fresh_nonce() -> String {
    format!("{:016x}{:016x}", RandomState::new().hash_one(1), RandomState::new().hash_one(2))
}

pub fn page(board: &StatusBoard, viewer: &Viewer, account: &PageAccount) -> Response {
    let nonce = fresh_nonce();
    let PageMain { title, element } = PageMain::of(board, viewer);
    let login = account_line(viewer, account);
    let html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>abide: {title}</title>\n<style nonce=\"{nonce}\">\n{STYLE}</style>\n\
         </head>\n<body>\n{element}<footer>abide {} · <a href=\"/api/v1/status\">status</a> · \
         <a href=\"/api/v1/processes\">processes</a> · <a href=\"/api/v1/plan\">plan</a> · <a href=\"/api/v1/history\">history</a> · \
         <a href=\"/metrics\">metrics</a> {login}<span id=\"live\"></span></footer>\n<script nonce=\"{nonce}\">\n{SCRIPT}</script>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION"),
    );
    let mut response = typed_response(Body::from(html), "text/html; charset=utf-8");
    let has_form = matches!(account, PageAccount::Person { csrf: Some(_), .. });
    set_policy(&mut response, &nonce, has_form);
    response
}

/// Title and main element, for the script of an open page. A style would violate the policy of that page, whose nonce differs.
pub fn main_element(board: &StatusBoard, viewer: &Viewer) -> Response {
    let PageMain { title, element } = PageMain::of(board, viewer);
    let html = format!("<!doctype html>\n<title>abide: {title}</title>\n{element}");
    let mut response = typed_response(Body::from(html), "text/html; charset=utf-8");
    set_policy(&mut response, &fresh_nonce(), false);
    response
}

/// The part of the page that changes.
struct PageMain {
    title: &'static str,
    element: String,
}

impl PageMain {
    fn of(board: &StatusBoard, viewer: &Viewer) -> PageMain {
        let status = board.status();
        let mut main = String::new();
        summary(&mut main, board, &status, viewer);
        problems(&mut main, &status, viewer);
        processes(&mut main, &status, viewer);
        events(&mut main, board, &status, viewer);
        let title = match (&status.trouble, converged(&status)) {
            (Some(_), _) => "trouble",
            (None, true) => "converged",
            (None, false) => "not converged",
        };
        let element = format!("<main id=\"main\" data-last=\"{}\">\n{main}</main>\n", status.number);
        PageMain { title, element }
    }
}

fn set_policy(response: &mut Response, nonce: &str, has_form: bool) {
    let form = if has_form { "'self'" } else { "'none'" };
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; base-uri 'none'; \
         form-action {form}; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
}

/// The end of the footer: a login, or the person with the actions of the role.
fn account_line(viewer: &Viewer, account: &PageAccount) -> String {
    match (viewer.view, account) {
        (_, PageAccount::Person { name, role, csrf }) => {
            let mut line = format!("· <b>{}</b> ({}) ", escape::html(name), role.word());
            if let Some(csrf) = csrf.as_deref().map(escape::html) {
                if *role >= AccessRole::Operate {
                    let _ = write!(
                        line,
                        "<button type=\"button\" id=\"look\" data-csrf=\"{csrf}\">reconcile now</button> "
                    );
                }
                let _ = write!(
                    line,
                    "<form method=\"post\" action=\"/api/v1/logout\"><input type=\"hidden\" name=\"csrf\" value=\"{csrf}\">\
                     <button>log out</button></form> "
                );
            }
            line
        }
        (View::Full, _) => String::new(),
        // Without the token, commands and environment values are hidden.
        (View::Redacted, PageAccount::Nothing) => "· commands and environment values are hidden ".to_owned(),
        (View::Redacted, PageAccount::CanLogIn) => {
            "· commands and environment values are hidden: <a href=\"/login\">log in</a> ".to_owned()
        }
    }
}

/// The login form of people. `csrf`: also in a cookie.
pub fn login_page(csrf: &str, message: Option<&str>) -> Response {
    let nonce = fresh_nonce();
    let message =
        message.map(|text| format!("<p class=\"box bad\" role=\"alert\">{}</p>\n", escape::html(text)));
    let html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>abide: log in</title>\n<style nonce=\"{nonce}\">\n{STYLE}</style>\n\
         </head>\n<body>\n<main class=\"login\">\n<h1>abide</h1>\n{}<form method=\"post\" action=\"/api/v1/login\">\n\
         <label for=\"token\">Your token</label>\n<input id=\"token\" name=\"token\" type=\"password\" autocomplete=\"current-password\" \
         required autofocus>\n<input type=\"hidden\" name=\"csrf\" value=\"{}\">\n<button>Log in</button>\n</form>\n</main>\n\
         <script nonce=\"{nonce}\">\n{LOGIN_SCRIPT}</script>\n</body>\n</html>\n",
        message.unwrap_or_default(),
        escape::html(csrf),
    );
    let mut response = typed_response(Body::from(html), "text/html; charset=utf-8");
    set_policy(&mut response, &nonce, true);
    response
}

fn summary(out: &mut String, board: &StatusBoard, status: &ControllerStatus, viewer: &Viewer) {
    let subject = &board.subject;
    let (class, word) = match (&status.trouble, &status.pass.last) {
        (Some(_), _) => ("bad", "trouble"),
        (None, None) => ("dull", "not observed yet"),
        (None, Some(_)) if status.work.in_flight > 0 => ("busy", "working"),
        (None, Some(_)) if converged(status) => ("good", "converged"),
        (None, Some(_)) => ("warn", "not converged"),
    };
    let _ = write!(
        out,
        "<header><h1>{}</h1> <span class=\"badge {class}\">{word}</span></header>\n<dl class=\"facts\">",
        escape::html(&format!("{} / {}", subject.target, subject.owner))
    );
    let role = match &status.role {
        Role::Starting => "starting".to_owned(),
        Role::Waiting { host, pid } => format!("standby: {host} (pid {pid}) is the leader"),
        Role::Leading { generation } => format!("leader (generation {generation})"),
    };
    let revision = status.source.revision.short();
    let observed_at = status.pass.last.as_ref().map_or("never".to_owned(), |pass| ago(pass.observed.at));
    let pass = status.pass.duration.map_or("none yet".to_owned(), |took| format!("{} ms", took.as_millis()));
    let paused: Vec<String> = status
        .pass
        .last
        .iter()
        .flat_map(|pass| &pass.rules.holds.pauses)
        .filter(|pause| viewer.sees_pause(pause.namespace.as_ref()))
        .map(|pause| pause.namespace.as_ref().map_or("everything".to_owned(), ToString::to_string))
        .collect();
    let mut facts = vec![
        ("role", role),
        ("source", subject.sources.join(", ")),
        ("revision", format!("{revision} ({})", count(status.source.files, "file"))),
        ("last observed", observed_at),
        ("last pass", pass),
        ("queue", status.work.queue.to_string()),
    ];
    if let Some(commit) = &status.source.commit {
        facts.insert(2, ("commit", commit.chars().take(12).collect()));
    }
    if !paused.is_empty() {
        facts.push(("paused", paused.join(", ")));
    }
    for (name, value) in facts {
        let _ = write!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", escape::html(&value));
    }
    out.push_str("</dl>\n");
    for trouble in status.trouble.iter().chain(&status.source.not_followed) {
        let _ = writeln!(out, "<p class=\"box bad\">{}</p>", escape::html(trouble));
    }
    out.push_str("<p class=\"counts\">");
    for sync in SyncStatus::ALL {
        let many = viewer.rows(status).filter(|row| row.sync == sync).count();
        if many > 0 {
            let _ = write!(out, "<span class=\"badge {}\">{many} {}</span> ", class_of(sync), sync.word());
        }
    }
    for health in [Health::Degraded, Health::Failed, Health::Starting] {
        let many = viewer.rows(status).filter(|row| health_of(row) == health).count();
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

fn problems(out: &mut String, status: &ControllerStatus, viewer: &Viewer) {
    if status.source.problems.is_empty() || !viewer.sees_everything() {
        return;
    }
    out.push_str("<h2>Problems in the manifests</h2>\n<ul class=\"problems\">\n");
    for problem in status.source.problems.iter().take(ROWS) {
        let class = if problem.severity == Severity::Error { "bad" } else { "warn" };
        let quotes = may_quote(&problem.message) || problem.hint.as_deref().is_some_and(may_quote);
        let is_hidden = viewer.view == View::Redacted && quotes;
        let message = if is_hidden { HIDDEN } else { &problem.message };
        let location = format!("{}:{}:{}", problem.file, problem.line, problem.column);
        let hint = problem
            .hint
            .as_deref()
            .filter(|_| !is_hidden)
            .map(|hint| format!(" <small>{}</small>", escape::html(hint)))
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "<li class=\"box {class}\"><code>{}</code> {}{hint}</li>",
            escape::html(&location),
            escape::html(message)
        );
    }
    out.push_str("</ul>\n");
}

fn processes(out: &mut String, status: &ControllerStatus, viewer: &Viewer) {
    let mut rows: Vec<&Row> = viewer.rows(status).collect();
    let is_settled = |row: &Row| {
        row.sync == SyncStatus::InSync
            && !matches!(health_of(row), Health::Failed | Health::Degraded | Health::Unknown)
    };
    rows.sort_by_key(|row| is_settled(row));
    out.push_str("<h2>Processes</h2>\n");
    if rows.is_empty() {
        out.push_str("<p class=\"dull\">No processes are declared, and none were observed.</p>\n");
        return;
    }
    out.push_str(
        "<table><thead><tr><th>process</th><th>host</th><th>sync</th><th>health</th><th>hosting</th><th>pid</th><th>why</th></tr></thead>\n<tbody>\n",
    );
    for row in rows.iter().take(ROWS) {
        process(out, row, viewer);
    }
    out.push_str("</tbody></table>\n");
    if rows.len() > ROWS {
        let more = rows.len() - ROWS;
        let _ = writeln!(
            out,
            "<p class=\"dull\">and {more} more: <a href=\"/api/v1/processes\">full list</a></p>"
        );
    }
}

fn process(out: &mut String, row: &Row, viewer: &Viewer) {
    let health = health_of(row);
    let running = row.seen.as_ref().and_then(|seen| seen.running).filter(|_| row.gap.is_none());
    let pid = row.seen.as_ref().and_then(|seen| seen.process.pid).filter(|_| row.gap.is_none());
    let pid = match (running, pid) {
        (Some(true), Some(pid)) => pid.to_string(),
        (Some(true), None) => "running".to_owned(),
        (Some(false), _) => "not running".to_owned(),
        (None, _) if row.seen.is_none() && row.gap.is_none() => "absent".to_owned(),
        (None, _) => "?".to_owned(),
    };
    let why = match (&row.held, &row.gap) {
        (Some((reason, detail)), _) => {
            format!("<b>{}</b> {}", reason.word(), escape::html(&viewer.detail(*reason, detail)))
        }
        (None, Some(gap)) => escape::html(gap),
        (None, None) => {
            row.declared.as_deref().map(|at| format!("<code>{}</code>", escape::html(at))).unwrap_or_default()
        }
    };
    // One element, because narrow screens lay out the cell's children separately.
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
        hosting_of(row).word(),
    );
}

fn events(out: &mut String, board: &StatusBoard, status: &ControllerStatus, viewer: &Viewer) {
    out.push_str("<h2>Events</h2>\n<ol class=\"events\">\n");
    let later = board.entries_after(status.number.saturating_sub(EVENTS), usize::MAX);
    for entry in later.notes.iter().rev().filter_map(|entry| viewer.entry(entry)) {
        let class = match entry.level {
            LogLevel::Info => "",
            LogLevel::Warning => "warn",
            LogLevel::Error => "bad",
        };
        let text = match entry.text.as_str() {
            "" => String::new(),
            text => format!("<pre>{}</pre>", escape::html(text)),
        };
        let _ = writeln!(
            out,
            "<li class=\"{class}\"><time>{}</time> <i>{}</i> {}{text}</li>",
            entry.at,
            entry.kind.word(),
            escape::html(&entry.title)
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
