//! Problems of manifests: code, message, source location and hint.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::contract::ManifestProblem;
pub use crate::contract::Severity;
use crate::escape::is_hidden;
use crate::model::count;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal $severity:ident $title:literal),* $(,)?) => {
        /// Stable problem codes. A number is never reused for another problem.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code { $($(#[$doc])* $name),* }

        impl Code {
            pub const ALL: &[Code] = &[$(Code::$name),*];

            pub fn text(self) -> &'static str {
                match self { $(Code::$name => $text),* }
            }

            pub fn severity(self) -> Severity {
                match self { $(Code::$name => Severity::$severity),* }
            }

            /// Short description of the rule.
            pub fn title(self) -> &'static str {
                match self { $(Code::$name => $title),* }
            }
        }
    };
}

codes! {
    // Reading
    Syntax = "E0101" Error "not well-formed YAML or JSON",
    UnknownField = "E0102" Error "a field that does not exist here",
    WrongType = "E0103" Error "a value of the wrong type",
    MissingField = "E0104" Error "a required field is missing",
    DuplicateKey = "E0105" Error "a key occurs twice in one map",
    UnknownKind = "E0106" Error "an unknown kind, apiVersion or shape of document",
    UnknownWord = "E0107" Error "a word that is not an allowed value",
    Unreadable = "E0110" Error "a file that cannot or must not be read",
    TooLarge = "E0111" Error "a limit of size, depth or number is exceeded",
    NotText = "E0112" Error "not UTF-8 text",
    HiddenCharacter = "E0113" Error "a hidden or misleading character",
    TooMany = "E0114" Error "more problems than are listed",
    Nothing = "E0115" Error "a watched tree that declares no process",
    // Values
    BadName = "E0201" Error "an invalid namespace, name, group or agent id",
    RelativePath = "E0202" Error "a relative path where an absolute one is needed",
    BadIp = "E0203" Error "not an IP address",
    BadPercent = "E0204" Error "a percentage outside 0 to 100",
    OutOfRange = "E0205" Error "a number outside its range",
    BadDuration = "E0206" Error "an invalid duration",
    BadCrontab = "E0207" Error "a crontab rule that does not parse",
    BadLabel = "E0208" Error "a label that is reserved or empty",
    BadVariable = "E0209" Error "an unknown ${variable}",
    BadDigest = "E0210" Error "not an md5 digest",
    BadEnv = "E0211" Error "an invalid environment variable",
    BadSelector = "E0212" Error "a label selector that does not parse",
    BadFieldPath = "E0213" Error "on_change names an unknown field",
    BadWindow = "E0214" Error "days, times or time zone of a window that do not parse",
    BadProbe = "E0216" Error "a health check without exactly one valid probe",
    BadVariableName = "E0217" Error "a variable with an invalid or reserved name",
    VariableCycle = "E0218" Error "variables that refer to each other in a cycle, or expand to too much text",
    BadHost = "E0215" Error "a host that is neither address, agent nor group, or several at once",
    // One document
    ScheduleOfType = "E0305" Error "a schedule in a process of another type than schedule",
    NoSchedule = "E0301" Error "a periodic process without a schedule",
    NoStartCommand = "E0302" Error "a state that needs start_cmd, without a start_cmd",
    StateImpossible = "E0303" Error "a state that this process type does not support",
    BadMove = "E0304" Error "an invalid moved_from",
    // Across documents
    SameInstance = "E0401" Error "one instance declared twice",
    SameIdentity = "E0402" Error "two processes of one host share an identity",
    UndefinedGroup = "E0403" Error "a host group that no manifest defines",
    EmptyGroup = "E0404" Error "a host group, or a selection in one, without hosts",
    UndefinedDependency = "E0405" Error "a dependency on a process that no manifest declares",
    DependencyCycle = "E0406" Error "a dependency cycle",
    PolicyViolated = "E0407" Error "a process that a Policy does not allow",
    DefaultsConflict = "E0408" Error "two Defaults of one directory disagree",
    SameName = "E0409" Error "two groups or policies with one name",
    HostConflict = "E0410" Error "one host described in two ways",
    InventoryUnknown = "E0411" Error "an inventory whose hosts are not known",
    InventoryFailed = "E0412" Error "an inventory that cannot be read, is empty, or lost too many hosts",
    // Overlays
    BadBase = "E0421" Error "a base that does not exist, is outside of the tree, or is named twice",
    BaseCycle = "E0422" Error "overlays that are bases of each other",
    PatchUnmatched = "E0423" Error "a patch that matches no process",
    PatchConflict = "E0424" Error "two patches of one overlay that set a field to different values",
    MisplacedOverlay = "E0425" Error "an Overlay that does not apply where it is",
    // Warnings
    NumberAsText = "W0501" Warning "a number in place of text",
    IgnoredField = "W0502" Warning "a request field that manifests ignore",
    UselessField = "W0503" Warning "a field without effect here",
    DependsOnDown = "W0504" Warning "a dependency on a process that is not declared running",
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        })
    }
}

impl Code {
    /// Documents are unreadable: references to them cannot be resolved.
    pub fn hides_documents(self) -> bool {
        matches!(
            self,
            Code::Syntax
                | Code::Unreadable
                | Code::TooLarge
                | Code::NotText
                | Code::HiddenCharacter
                | Code::BadBase
                | Code::MisplacedOverlay
        )
    }

    /// A problem of one document can quote lines of others.
    pub fn concerns_several_documents(self) -> bool {
        matches!(
            self,
            Code::SameInstance
                | Code::SameIdentity
                | Code::UndefinedGroup
                | Code::EmptyGroup
                | Code::UndefinedDependency
                | Code::DependencyCycle
                | Code::PolicyViolated
                | Code::DefaultsConflict
                | Code::SameName
                | Code::HostConflict
                | Code::InventoryUnknown
                | Code::DependsOnDown
                | Code::BadVariable
                | Code::VariableCycle
                | Code::BadBase
                | Code::BaseCycle
                | Code::PatchUnmatched
                | Code::PatchConflict
                | Code::MisplacedOverlay
                | Code::TooMany
        )
    }

    /// The other location has the same problem.
    pub fn names_conflict(self) -> bool {
        matches!(self, Code::SameInstance | Code::SameIdentity)
    }
}

/// A problem as reported to users and scripts. Sorted by file, location, then code.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
    pub severity: Severity,
    pub code: Code,
    pub message: String,
    pub hint: Option<String>,
    /// Source line for text output.
    pub excerpt: Excerpt,
}

impl From<&Problem> for ManifestProblem {
    fn from(problem: &Problem) -> ManifestProblem {
        let Problem { file, line, column, severity, code, message, hint, excerpt: _ } = problem;
        ManifestProblem {
            file: file.to_string(),
            line: *line,
            column: *column,
            severity: *severity,
            code: code.text().to_owned(),
            message: message.clone(),
            hint: hint.clone(),
        }
    }
}

/// A source line, cut to screen width, and the range to underline.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Excerpt {
    pub text: String,
    /// In characters of `text`, from 0.
    pub from: usize,
    pub len: usize,
}

impl Excerpt {
    /// The line around a byte of a text. Reads at most a screen width: a line may be megabytes long.
    pub fn around(text: &str, at: usize, len: usize) -> Excerpt {
        const BEFORE: usize = 60;
        const AFTER: usize = 100;
        const WIDEST: usize = 4; // bytes in a character
        let at = text.floor_char_boundary(at);
        let window = text.ceil_char_boundary(at.saturating_sub((BEFORE + 1) * WIDEST));
        let line = text[window..at].rsplit('\n').next().unwrap_or_default();
        let before: Vec<char> = line.chars().collect();
        let skipped = before.len().saturating_sub(BEFORE);
        let end = text.floor_char_boundary((at + (AFTER + 1) * WIDEST).min(text.len()));
        let rest = text[at..end].split('\n').next().unwrap_or_default().trim_end_matches('\r');
        let mut shown: String =
            before[skipped..].iter().chain(&rest.chars().take(AFTER).collect::<Vec<_>>()).collect();
        let mut from = before.len() - skipped;
        if skipped > 0 {
            shown.insert(0, '…');
            from += 1;
        }
        let len = len.min(shown.chars().count().saturating_sub(from)).max(1);
        if rest.chars().nth(AFTER).is_some() {
            shown.push('…');
        }
        if may_contain_secret(&shown) { Excerpt::default() } else { Excerpt { text: shown, from, len } }
    }
}

/// Whether a line may contain a secret, which must not reach a log.
fn may_contain_secret(line: &str) -> bool {
    let line = line.to_lowercase();
    ["secret", "token", "passw"].iter().any(|word| line.contains(word))
}

impl Problem {
    /// A problem with its file and source line.
    pub fn new(file: Arc<str>, problem: SpanProblem, excerpt: Excerpt) -> Problem {
        let SpanProblem { code, span, message, hint, .. } = problem;
        Problem {
            file,
            line: span.line,
            column: span.column,
            severity: code.severity(),
            code,
            message: visible(&message),
            hint: hint.as_deref().map(visible),
            excerpt,
        }
    }

    /// A problem of a file as a whole.
    pub fn of_file(file: Arc<str>, code: Code, message: String, hint: Option<String>) -> Problem {
        Problem::new(file, SpanProblem::new(code, Span::at(1, 1), message, hint), Excerpt::default())
    }
}

/// Replaces hidden and control characters, so that the text is safe to print.
fn visible(text: &str) -> String {
    let shown = |c: char| if is_hidden(c) || c.is_control() { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

/// Line and column from 1, in characters; `len` is the number of characters to underline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    pub line: u32,
    pub column: u32,
    pub len: u32,
    /// Byte offset in the text, if known.
    pub byte: Option<usize>,
}

impl Span {
    pub fn at(line: u32, column: u32) -> Span {
        Span { line, column, len: 1, byte: None }
    }
}

/// A problem with a known position in a text or tree. The caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanProblem {
    pub code: Code,
    pub span: Span,
    pub message: String,
    pub hint: Option<String>,
    /// The line may contain a secret and is not shown.
    pub private: bool,
}

/// Maximum number of listed problems per document and per file. More come from a broken generator or a hostile file.
pub const MAX_PER_DOCUMENT: usize = 1_000;
pub const MAX_PER_FILE: usize = 10_000;

impl SpanProblem {
    pub fn new(code: Code, span: Span, message: String, hint: Option<String>) -> SpanProblem {
        SpanProblem { code, span, message, hint, private: false }
    }

    pub fn too_many_documents(most: usize, span: Span) -> SpanProblem {
        let message = format!("the file has more than {}", count(most, "document"));
        let hint = "if this is intended, raise --max-documents".to_owned();
        SpanProblem::new(Code::TooLarge, span, message, Some(hint))
    }

    /// Summary of the problems that are not listed.
    pub fn more(count: usize, of: &str, span: Span) -> SpanProblem {
        let message = format!("this {of} has {count} more problems, which are not listed");
        SpanProblem::new(Code::TooMany, span, message, Some("fix the listed problems first".to_owned()))
    }
}

/// Placeholder in a message for the location of `other`. User text never contains it.
pub const OTHER_LOCATION: &str = "\0";

/// Index of [`PathProblem::other`] for a second location in the same document.
pub const SAME_DOCUMENT: usize = usize::MAX;

/// One segment of a field path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathSegment {
    Key(Cow<'static, str>),
    Index(usize),
}

/// Path from a document's root to a value, such as `hosts[3].ip`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FieldPath(pub Vec<PathSegment>);

impl FieldPath {
    pub fn root() -> FieldPath {
        FieldPath::default()
    }

    /// From a constant dotted path.
    pub fn of(dotted: &'static str) -> FieldPath {
        FieldPath(dotted.split('.').map(|name| PathSegment::Key(Cow::Borrowed(name))).collect())
    }

    pub fn key(&self, name: &'static str) -> FieldPath {
        self.child(PathSegment::Key(Cow::Borrowed(name)))
    }

    /// Appends a user-defined key.
    pub fn entry(&self, name: &str) -> FieldPath {
        self.child(PathSegment::Key(Cow::Owned(name.to_owned())))
    }

    pub fn index(&self, at: usize) -> FieldPath {
        self.child(PathSegment::Index(at))
    }

    fn child(&self, segment: PathSegment) -> FieldPath {
        let mut segments = self.0.clone();
        segments.push(segment);
        FieldPath(segments)
    }

    /// The first index of a list.
    pub fn first_index(&self) -> Option<usize> {
        self.0.iter().find_map(|segment| match segment {
            PathSegment::Index(at) => Some(*at),
            PathSegment::Key(_) => None,
        })
    }

    pub fn starts_with(&self, other: &FieldPath) -> bool {
        self.0.starts_with(&other.0)
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, step) in self.0.iter().enumerate() {
            match step {
                PathSegment::Key(name) if nth == 0 => write!(f, "{name}")?,
                PathSegment::Key(name) => write!(f, ".{name}")?,
                PathSegment::Index(at) => write!(f, "[{at}]")?,
            }
        }
        Ok(())
    }
}

/// A problem with a field path, not yet located in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathProblem {
    pub code: Code,
    pub path: FieldPath,
    pub at: PathPart,
    /// [`OTHER_LOCATION`] is replaced by the location of `other`.
    pub message: String,
    pub hint: Option<String>,
    /// Second location: document and path.
    pub other: Option<(usize, FieldPath)>,
}

/// Part of a map entry that a problem points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathPart {
    Key,
    Value,
}

impl PathProblem {
    pub fn new(code: Code, path: FieldPath, message: impl Into<String>) -> PathProblem {
        PathProblem { code, path, at: PathPart::Value, message: message.into(), hint: None, other: None }
    }

    pub fn is_error(&self) -> bool {
        self.code.severity() == Severity::Error
    }

    pub fn hint(mut self, hint: impl Into<String>) -> PathProblem {
        self.hint = Some(hint.into());
        self
    }

    pub fn at_key(mut self) -> PathProblem {
        self.at = PathPart::Key;
        self
    }

    /// Replaces [`SAME_DOCUMENT`] by the index of the document.
    pub fn in_document(mut self, document: usize) -> PathProblem {
        if let Some((other, _)) = self.other.as_mut().filter(|(other, _)| *other == SAME_DOCUMENT) {
            *other = document;
        }
        self
    }

    pub fn other(mut self, document: usize, path: FieldPath) -> PathProblem {
        self.other = Some((document, path));
        self
    }
}

/// The most similar word of a list.
pub fn did_you_mean<'a>(word: &str, among: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // The distance costs the product of both lengths, and a long word is not a misspelling.
    if word.len() > 64 {
        return None;
    }
    let lower = word.to_lowercase();
    among
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
