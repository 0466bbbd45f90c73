//! Route table of the status server: paths, methods and the permission that each route requires.

/// Every method and path.
pub fn route_table() -> impl Iterator<Item = (&'static str, &'static str)> {
    Route::ALL.into_iter().map(|(path, route)| (route.method(), path))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Page,
    Login,
    /// The login form of people.
    LogIn,
    LogOut,
    Session,
    Status,
    Processes,
    Events,
    Plan,
    History,
    Metrics,
    Health,
    Ready,
    Pause,
    Resume,
    Trigger,
    Webhook,
    Description,
}

/// Permission that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Permission {
    Nothing,
    Reading,
    Changing,
    /// A signature of the body.
    Signed,
    /// A token in the body.
    LoggingIn,
    /// An open session.
    LoggingOut,
}

impl Route {
    pub(super) const ALL: [(&str, Route); 18] = [
        ("/", Route::Page),
        ("/login", Route::Login),
        ("/metrics", Route::Metrics),
        ("/healthz", Route::Health),
        ("/readyz", Route::Ready),
        ("/api/v1/status", Route::Status),
        ("/api/v1/processes", Route::Processes),
        ("/api/v1/events", Route::Events),
        ("/api/v1/plan", Route::Plan),
        ("/api/v1/history", Route::History),
        ("/api/v1/pause", Route::Pause),
        ("/api/v1/resume", Route::Resume),
        ("/api/v1/look", Route::Trigger),
        ("/api/v1/webhook", Route::Webhook),
        ("/api/v1/login", Route::LogIn),
        ("/api/v1/logout", Route::LogOut),
        ("/api/v1/session", Route::Session),
        ("/api/v1/openapi.json", Route::Description),
    ];

    pub(super) fn find(path: &str) -> Option<Route> {
        let path = if path.starts_with("/api/v1/") { path.trim_end_matches('/') } else { path };
        Route::ALL.into_iter().find(|(known, _)| *known == path).map(|(_, route)| route)
    }

    pub(super) fn method(self) -> &'static str {
        match self.permission() {
            Permission::Nothing | Permission::Reading => "GET",
            Permission::Changing | Permission::Signed => "POST",
            Permission::LoggingIn | Permission::LoggingOut => "POST",
        }
    }

    pub(super) fn permission(self) -> Permission {
        match self {
            Route::Health | Route::Ready | Route::Login => Permission::Nothing,
            Route::Page | Route::Status | Route::Processes | Route::Events => Permission::Reading,
            Route::Plan | Route::History | Route::Metrics | Route::Description => Permission::Reading,
            Route::Session => Permission::Reading,
            Route::LogIn => Permission::LoggingIn,
            Route::LogOut => Permission::LoggingOut,
            Route::Pause | Route::Resume | Route::Trigger => Permission::Changing,
            Route::Webhook => Permission::Signed,
        }
    }

    /// Whether the route exists only with a users file.
    pub(super) fn is_of_people(self) -> bool {
        matches!(self, Route::LogIn | Route::LogOut | Route::Session)
    }
}
