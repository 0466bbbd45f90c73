//! OpenAPI 3.1 description of the controller's API: routes from the route table, schemas from the types of the contract.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::routes::{Permission, Route};
use crate::contract::{
    Accepted, ControllerProcess, ControllerReport, ErrorBody, EventEntry, HistoryEntry, PauseRequest, Paused,
    PlanDocument, Resumed, SchemaSet, ServerHealth, SessionInfo,
};

pub fn description() -> &'static Value {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(build);
    &DOCUMENT
}

fn build() -> Value {
    let mut schemas = SchemaSet::new();
    let mut paths: Map<String, Value> = Map::new();
    for (path, route) in Route::ALL {
        let operation = operation(&mut schemas, path, route);
        paths.insert(path.to_owned(), json!({route.method().to_lowercase(): operation}));
    }
    let about = "Status, events and pauses of `abide watch`. Reading needs the token where the listener requires it; \
                 without the token, command lines and environment values are hidden. Changes always need it. Every \
                 failure has an `error`.";
    let token = json!({"type": "http", "scheme": "bearer", "description": "the token of the listener, or of a person in the users file"});
    let csrf = "the CSRF token of a session, from `GET /api/v1/session`; with a cookie, each change needs it";
    let csrf = json!({"type": "apiKey", "in": "header", "name": "X-Abide-Csrf", "description": csrf});
    let (security, schemes) = (json!([{"token": []}, {"csrf": []}]), json!({"token": token, "csrf": csrf}));
    schemas.document(("Abide controller", about), security, schemes, paths)
}

fn operation(schemas: &mut SchemaSet, path: &str, route: Route) -> Value {
    let mut operation = json!({
        "operationId": format!("{}{}", route.method().to_lowercase(), path.replace(['/', '.', '-'], "_")),
        "summary": summary(route),
        "responses": responses(schemas, route),
    });
    if matches!(route, Route::Pause | Route::Resume) {
        let body = json!({"application/json": {"schema": schemas.request::<PauseRequest>()}});
        operation["requestBody"] = json!({"required": true, "content": body});
    }
    let parameters: &[(&str, &str)] = match route {
        Route::History => &[("limit", "1 to 10000, default 100")],
        Route::Events => &[("after", "number of the last received event, as Last-Event-ID")],
        _ => &[],
    };
    if !parameters.is_empty() {
        let parameter = |(name, about): &(&str, &str)| json!({"name": name, "in": "query", "description": about, "schema": {"type": "string"}});
        operation["parameters"] = parameters.iter().map(parameter).collect();
    }
    match route.permission() {
        Permission::Nothing | Permission::Signed => operation["security"] = json!([]),
        Permission::LoggingIn => operation["security"] = json!([]),
        Permission::LoggingOut => operation["security"] = json!([{"csrf": []}]),
        Permission::Reading => operation["security"] = json!([{}, {"token": []}]),
        Permission::Changing => {}
    }
    operation
}

fn summary(route: Route) -> &'static str {
    match route {
        Route::Page => "Status page",
        Route::Login => {
            "Login form of people; without a users file, ask a browser for the token and redirect to the page"
        }
        Route::LogIn => "Open a session with the token of a person; only with a users file",
        Route::LogOut => "End the session; only with a users file",
        Route::Session => {
            "Get the caller, its grant and the CSRF token of its session; only with a users file"
        }
        Route::Status => "Get the overview",
        Route::Processes => "List processes as of the last observation",
        Route::Events => {
            "Stream server-sent events; each `data` line is one event, or `{\"kind\":\"missed\"}`"
        }
        Route::Plan => "Get the plan of the last pass",
        Route::History => "List applied plans, newest first",
        Route::Metrics => "Prometheus metrics",
        Route::Health => "Liveness check",
        Route::Ready => "Readiness check",
        Route::Pause => "Pause a namespace, or everything",
        Route::Resume => "End a pause",
        Route::Trigger => "Start a pass",
        Route::Webhook => "Start a pass by a signed webhook; only with a webhook secret",
        Route::Description => "This description",
    }
}

/// Status, media type and schema of a success.
fn answer(schemas: &mut SchemaSet, route: Route) -> (&'static str, &'static str, Value) {
    let json = "application/json";
    match route {
        Route::Page => ("200", "text/html", json!({})),
        Route::Login | Route::LogIn | Route::LogOut => ("303", "text/plain", json!({})),
        Route::Session => ("200", json, schemas.response::<SessionInfo>()),
        Route::Status => ("200", json, schemas.response::<ControllerReport>()),
        Route::Processes => ("200", json, schemas.response::<Vec<ControllerProcess>>()),
        Route::Events => ("200", "text/event-stream", schemas.response::<EventEntry>()),
        Route::Plan => ("200", json, schemas.response::<PlanDocument>()),
        Route::History => ("200", json, schemas.response::<Vec<HistoryEntry>>()),
        Route::Metrics => ("200", "text/plain", json!({})),
        Route::Health | Route::Ready => ("200", json, schemas.response::<ServerHealth>()),
        Route::Pause => ("200", json, schemas.response::<Paused>()),
        Route::Resume => ("200", json, schemas.response::<Resumed>()),
        Route::Trigger | Route::Webhook => ("202", json, schemas.response::<Accepted>()),
        Route::Description => ("200", json, json!({})),
    }
}

fn responses(schemas: &mut SchemaSet, route: Route) -> Value {
    let (status, media_type, schema) = answer(schemas, route);
    let mut all = json!({status: {"description": "success", "content": {media_type: {"schema": schema}}}});
    let error = json!({"application/json": {"schema": schemas.response::<ErrorBody>()}});
    let unavailable = match route {
        Route::Health | Route::Ready => {
            json!({"application/json": {"schema": schemas.response::<ServerHealth>()}})
        }
        _ => error.clone(),
    };
    let bodies: &[(&str, &str)] = match route.method() {
        "POST" => &[("408", "reading the body timed out"), ("413", "the body is too large or incomplete")],
        _ => &[],
    };
    let requests: &[(&str, &str)] = match route {
        Route::Pause | Route::Resume | Route::History | Route::Events => &[("400", "invalid request")],
        Route::Webhook => &[("404", "webhooks are disabled")],
        Route::LogIn | Route::LogOut | Route::Session => &[("404", "there is no users file")],
        _ => &[],
    };
    let common = [
        ("401", "the token or the signature is missing or wrong"),
        (
            "403",
            "a missing grant or CSRF token, an unknown name in the Host header, or no token is configured",
        ),
        ("405", "method not allowed"),
        ("429", "too many requests with wrong credentials"),
    ];
    for (status, why) in bodies.iter().chain(requests).chain(&common) {
        all[*status] = json!({"description": why, "content": error});
    }
    all["503"] = json!({"description": "not available now", "content": unavailable});
    all
}
