//! Sandbox of a spec: restrictions of its process and of every command, in the words and meaning of systemd.exec.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::spec::is_unset;
use super::supervision::{Parts, SectionParts, SpecSection};

/// Restrictions of the process and of every command of its spec. An unset field restricts nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sandbox {
    #[serde(skip_serializing_if = "is_unset")]
    pub no_new_privs: Option<bool>,
    /// The bounding set, as names such as `CAP_NET_BIND_SERVICE`; an empty list allows none.
    #[serde(skip_serializing_if = "is_unset")]
    pub capabilities: Option<Vec<String>>,
    /// Octal text such as "0027" in JSON, as in a manifest.
    #[serde(with = "octal", skip_serializing_if = "is_unset")]
    pub umask: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub nice: Option<i32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub oom_score_adj: Option<i32>,
    /// Soft and hard limit by name, such as `nofile`.
    #[serde(skip_serializing_if = "is_unset")]
    pub ulimits: BTreeMap<String, Ulimit>,
    #[serde(skip_serializing_if = "is_unset")]
    pub private_tmp: Option<bool>,
    #[serde(skip_serializing_if = "is_unset")]
    pub read_only_paths: Vec<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub protect_system: Option<ProtectSystem>,
}

/// A field of a sandbox whose value no host can enforce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxProblem {
    /// Path below the spec, such as `sandbox.umask`.
    pub field: String,
    pub why: &'static str,
}

impl std::fmt::Display for SandboxProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.field, self.why)
    }
}

impl std::error::Error for SandboxProblem {}

impl Sandbox {
    /// The names of all fields.
    pub const FIELDS: [&str; 9] = [
        "no_new_privs",
        "capabilities",
        "umask",
        "nice",
        "oom_score_adj",
        "ulimits",
        "private_tmp",
        "read_only_paths",
        "protect_system",
    ];
    pub const NICE: std::ops::RangeInclusive<i32> = -20..=19;
    pub const OOM_SCORE_ADJ: std::ops::RangeInclusive<i32> = -1000..=1000;
    /// Maximum number of read-only paths: each is a mount of every launch.
    pub const MAX_PATHS: usize = 256;

    /// The first invalid value. Manifests are checked with source locations; a request of another client only here.
    pub fn check(&self) -> Result<(), SandboxProblem> {
        let problem = |field: String, why| SandboxProblem { field: format!("sandbox.{field}"), why };
        let is_absolute = |path: &str| path.starts_with('/') && !path.contains('\0');
        for name in self.capabilities.iter().flatten() {
            if capability_number(name).is_none() {
                return Err(problem("capabilities".to_owned(), "names an unknown capability"));
            }
        }
        for name in self.ulimits.keys() {
            if ulimit_number(name).is_none() {
                return Err(problem("ulimits".to_owned(), "names an unknown limit"));
            }
        }
        let in_range = [
            ("umask", self.umask.is_none_or(|mask| mask <= 0o777)),
            ("nice", self.nice.is_none_or(|nice| Sandbox::NICE.contains(&nice))),
            ("oom_score_adj", self.oom_score_adj.is_none_or(|score| Sandbox::OOM_SCORE_ADJ.contains(&score))),
        ];
        if let Some((field, _)) = in_range.into_iter().find(|(_, is_valid)| !is_valid) {
            return Err(problem(field.to_owned(), "is out of range"));
        }
        if self.read_only_paths.len() > Sandbox::MAX_PATHS {
            return Err(problem("read_only_paths".to_owned(), "has more than 256 entries"));
        }
        match self.read_only_paths.iter().position(|path| !is_absolute(path)) {
            Some(nth) => Err(problem(format!("read_only_paths[{nth}]"), "is not an absolute path")),
            None => Ok(()),
        }
    }
}

/// A mask as octal text.
mod octal {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(mask: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
        match mask {
            Some(mask) => to.serialize_str(&format!("{mask:04o}")),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
        super::octal_mask(&text)
            .map(Some)
            .ok_or_else(|| D::Error::custom("umask is not octal text such as \"0027\""))
    }
}

/// The value of octal text such as `0027`, at most `0777`.
pub fn octal_mask(text: &str) -> Option<u32> {
    let is_octal = (1..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    u32::from_str_radix(text, 8).ok().filter(|mask| is_octal && *mask <= 0o777)
}

/// Soft and hard value of a resource limit. In a manifest: a number or `infinity` for both, or `SOFT:HARD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UlimitWire", into = "UlimitWire")]
pub struct Ulimit {
    pub soft: u64,
    pub hard: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum UlimitWire {
    Number(u64),
    Text(String),
}

impl Ulimit {
    /// The kernel's value of an infinite limit.
    pub const INFINITY: u64 = u64::MAX;

    pub fn both(limit: u64) -> Ulimit {
        Ulimit { soft: limit, hard: limit }
    }

    /// `None`: not a limit, or the soft value is above the hard one.
    pub fn parse(text: &str) -> Option<Ulimit> {
        let value = |text: &str| match text {
            "infinity" => Some(Ulimit::INFINITY),
            number if number.bytes().all(|byte| byte.is_ascii_digit()) => number.parse().ok(),
            _ => None,
        };
        let (soft, hard) = text.split_once(':').unwrap_or((text, text));
        let limit = Ulimit { soft: value(soft)?, hard: value(hard)? };
        (limit.soft <= limit.hard).then_some(limit)
    }
}

impl TryFrom<UlimitWire> for Ulimit {
    type Error = &'static str;

    fn try_from(wire: UlimitWire) -> Result<Ulimit, Self::Error> {
        match wire {
            UlimitWire::Number(limit) => Ok(Ulimit::both(limit)),
            UlimitWire::Text(text) => {
                Ulimit::parse(&text).ok_or("a limit must be a number, infinity or SOFT:HARD")
            }
        }
    }
}

impl From<Ulimit> for UlimitWire {
    fn from(limit: Ulimit) -> UlimitWire {
        match limit.soft == limit.hard && limit.soft != Ulimit::INFINITY {
            true => UlimitWire::Number(limit.soft),
            false => UlimitWire::Text(limit.to_string()),
        }
    }
}

impl std::fmt::Display for Ulimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |limit: u64| match limit {
            Ulimit::INFINITY => "infinity".to_owned(),
            limit => limit.to_string(),
        };
        match self.soft == self.hard {
            true => f.write_str(&text(self.soft)),
            false => write!(f, "{}:{}", text(self.soft), text(self.hard)),
        }
    }
}

/// Read-only system directories, as in systemd.exec's ProtectSystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProtectSystem {
    /// /usr and the boot loader.
    True,
    /// Also /etc.
    Full,
    /// Everything but /dev, /proc and /sys.
    Strict,
}

impl ProtectSystem {
    pub const ALL: [ProtectSystem; 3] = [ProtectSystem::True, ProtectSystem::Full, ProtectSystem::Strict];

    pub fn word(self) -> &'static str {
        match self {
            ProtectSystem::True => "true",
            ProtectSystem::Full => "full",
            ProtectSystem::Strict => "strict",
        }
    }
}

impl SpecSection for Sandbox {
    fn parts(&self) -> SectionParts {
        let Sandbox {
            no_new_privs,
            capabilities,
            umask,
            nice,
            oom_score_adj,
            ulimits,
            private_tmp,
            read_only_paths,
            protect_system,
        } = self;
        let mut parts = Parts::default()
            .put("no_new_privs", no_new_privs.as_ref())
            .put("capabilities", capabilities.as_ref().map(|names| names.join(" ")))
            .put("umask", umask.map(|mask| format!("{mask:04o}")))
            .put("nice", nice.as_ref())
            .put("oom_score_adj", oom_score_adj.as_ref());
        for (name, limit) in ulimits {
            parts = parts.put(&format!("ulimits.{name}"), Some(limit));
        }
        parts
            .put("private_tmp", private_tmp.as_ref())
            .list("read_only_paths", read_only_paths)
            .put("protect_system", protect_system.map(ProtectSystem::word))
            .0
    }
}

/// The limits that `ulimits` may name, by their numbers on Linux.
pub const ULIMITS: [&str; 16] = [
    "cpu",
    "fsize",
    "data",
    "stack",
    "core",
    "rss",
    "nproc",
    "nofile",
    "memlock",
    "as",
    "locks",
    "sigpending",
    "msgqueue",
    "nice",
    "rtprio",
    "rttime",
];

/// The number of a limit by its name.
pub fn ulimit_number(name: &str) -> Option<usize> {
    ULIMITS.iter().position(|known| *known == name)
}

/// The capabilities of Linux, by their numbers, without `CAP_`.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// The number of a capability by its name with `CAP_`.
pub fn capability_number(name: &str) -> Option<usize> {
    let name = name.strip_prefix("CAP_")?;
    CAPABILITIES.iter().position(|known| *known == name)
}

/// The names of all capabilities, with `CAP_`.
pub fn capability_names() -> impl Iterator<Item = String> {
    CAPABILITIES.iter().map(|name| format!("CAP_{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_bounding_set_is_set() {
        assert!(Sandbox::default().parts().is_empty());
        let none = Sandbox { capabilities: Some(Vec::new()), ..Sandbox::default() };
        assert_eq!(none.parts(), [("capabilities".to_owned(), String::new())]);
    }

    #[test]
    fn a_limit_has_one_or_two_values() {
        let parsed =
            |text: &str| Ulimit::parse(text).map(|limit| (limit.soft, limit.hard, limit.to_string()));
        assert_eq!(parsed("17"), Some((17, 17, "17".to_owned())));
        assert_eq!(parsed("17:18"), Some((17, 18, "17:18".to_owned())));
        assert_eq!(parsed("0:infinity"), Some((0, u64::MAX, "0:infinity".to_owned())));
        assert_eq!(parsed("infinity"), Some((u64::MAX, u64::MAX, "infinity".to_owned())));
        for wrong in ["", ":", "1:", ":1", "2:1", "infinity:1", "+1", "1:2:3", "99999999999999999999"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
        for (json, limit) in
            [("17", Ulimit::both(17)), ("\"1:infinity\"", Ulimit { soft: 1, hard: u64::MAX })]
        {
            assert_eq!(serde_json::from_str::<Ulimit>(json).expect("a limit"), limit);
            assert_eq!(serde_json::to_string(&limit).expect("JSON"), json);
        }
    }

    #[test]
    fn a_umask_is_octal_text() {
        let sandbox = Sandbox { umask: Some(0o027), ..Sandbox::default() };
        let json = r#"{"umask":"0027"}"#;
        assert_eq!(serde_json::to_string(&sandbox).expect("JSON"), json);
        assert_eq!(serde_json::from_str::<Sandbox>(json).expect("a sandbox"), sandbox);
        for wrong in [r#"{"umask":"1000"}"#, r#"{"umask":"9"}"#, r#"{"umask":"+1"}"#, r#"{"umask":27}"#] {
            assert!(serde_json::from_str::<Sandbox>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_have_the_kernels_numbers() {
        assert_eq!(ulimit_number("nofile"), Some(7));
        assert_eq!(ulimit_number("rttime"), Some(15));
        assert_eq!(capability_number("CAP_NET_BIND_SERVICE"), Some(10));
        assert_eq!(capability_number("CAP_SYS_ADMIN"), Some(21));
        assert_eq!(capability_number("CAP_CHECKPOINT_RESTORE"), Some(40));
        assert_eq!(capability_number("NET_RAW"), None);
    }

    #[test]
    fn values_that_no_host_can_enforce_are_named() {
        let checked = |sandbox: Sandbox| sandbox.check().expect_err("invalid").to_string();
        let one = |set: fn(&mut Sandbox)| {
            let mut sandbox = Sandbox::default();
            set(&mut sandbox);
            checked(sandbox)
        };
        assert_eq!(one(|s| s.umask = Some(0o1000)), "sandbox.umask is out of range");
        assert_eq!(one(|s| s.nice = Some(20)), "sandbox.nice is out of range");
        assert_eq!(one(|s| s.oom_score_adj = Some(-1001)), "sandbox.oom_score_adj is out of range");
        assert_eq!(
            one(|s| s.capabilities = Some(vec!["CAP_ALL".to_owned()])),
            "sandbox.capabilities names an unknown capability"
        );
        assert_eq!(
            one(|s| s.read_only_paths = vec!["/a".to_owned(), "b".to_owned()]),
            "sandbox.read_only_paths[1] is not an absolute path"
        );
        assert_eq!(
            one(|s| s.ulimits = BTreeMap::from([("files".to_owned(), Ulimit::both(1))])),
            "sandbox.ulimits names an unknown limit"
        );
        assert_eq!(Sandbox::default().check(), Ok(()));
    }
}
