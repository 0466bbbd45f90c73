//! Field table of Overlay documents.

use super::Requirement::{Optional, Required};
use super::Shape::{Bool, List, OneOf, Text};
use super::table::{KIND, VARS, VERSION, entry};
use super::{FieldOrigin, Section, Shape};

pub static OVERLAY: Section = Section {
    name: "Overlay",
    about: "A variant of other manifests: its base, with other variables and patches. It is in a file overlay.yaml, whose directory may hold documents of its own.",
    entries: &[
        VERSION,
        KIND,
        entry("meta", Shape::Section(&META), Optional, FieldOrigin::Abide, "Name of the overlay."),
        entry("base", OneOf(&[Text, List(&Text)]), Optional, FieldOrigin::Abide, "Files and directories that the overlay is based on, relative to its own directory and inside the same repository. A directory with an Overlay is taken with its variables and patches."),
        entry("vars", VARS, Optional, FieldOrigin::Abide, "Variables, used as ${NAME}. They win over those of Defaults, host groups, hosts and the overlays in `base`."),
        entry("patches", List(&Shape::Section(&PATCH)), Optional, FieldOrigin::Abide, "Changes of processes, of the base and of the directory itself."),
    ],
};

static META: Section = Section {
    name: "meta",
    about: "Name of the overlay.",
    entries: &[entry("name", Text, Optional, FieldOrigin::Abide, "Name of the overlay.")],
};

static PATCH: Section = Section {
    name: "patches[]",
    about: "A change of all processes that match.",
    entries: &[
        entry("match", Shape::Section(&MATCH), Required, FieldOrigin::Abide, "The processes that the patch changes. {}: all."),
        entry("patch", Shape::Patch, Required, FieldOrigin::Abide, "Fields of a Process. Maps merge, lists and values of env are replaced, null removes a field."),
        entry("optional", Bool, Optional, FieldOrigin::Abide, "The patch may match no process.").with_default("false"),
    ],
};

static MATCH: Section = Section {
    name: "match",
    about: "The processes that the patch changes: those that match every field.",
    entries: &[
        entry("namespace", Text, Optional, FieldOrigin::Abide, "Pattern of namespaces; `*` matches any text."),
        entry("name", Text, Optional, FieldOrigin::Abide, "Pattern of names; `*` matches any text."),
        entry("labels", Text, Optional, FieldOrigin::Abide, "Label selector, such as tier=front,rack in (a,b),!old."),
    ],
};
