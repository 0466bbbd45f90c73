//! POSIX access control lists: users and groups with rights beyond the mode of a file.

use std::path::Path;

use super::{group_name, user_name};

pub const READ: u16 = 4;
pub const WRITE: u16 = 2;

/// Tags of the entries that name a user, name a group, and limit both.
const NAMED_USER: u16 = 0x02;
const NAMED_GROUP: u16 = 0x08;
const MASK: u16 = 0x10;

/// Maximum length of a list that is read. A longer one counts as an entry for others.
const MAX_BYTES: usize = 64 << 10;

/// The holder of this right by an access control list, other than root and the trusted user; `None`: no list, or no such
/// entry.
pub fn others(path: &Path, trusted: u32, right: u16) -> Option<String> {
    let mut bytes = vec![0; MAX_BYTES];
    let length = match rustix::fs::getxattr(path, "system.posix_acl_access", bytes.as_mut_slice()) {
        Ok(length) => length,
        Err(rustix::io::Errno::RANGE) => return Some("a very long list of users".to_owned()),
        // No list, or a file system without lists.
        Err(_) => return None,
    };
    first_other(bytes.get(..length).unwrap_or_default(), trusted, right)
}

/// Version, then entries of tag, rights and id, all little-endian.
fn first_other(list: &[u8], trusted: u32, right: u16) -> Option<String> {
    let entries: Vec<(u16, u16, u32)> = list
        .get(4..)
        .unwrap_or_default()
        .chunks_exact(8)
        .map(|entry| {
            let short = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
            (short(0), short(2), u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]))
        })
        .collect();
    let mask = entries.iter().find(|(tag, ..)| *tag == MASK).map_or(u16::MAX, |(_, rights, _)| *rights);
    entries.iter().filter(|(_, rights, _)| rights & mask & right != 0).find_map(|(tag, _, id)| match *tag {
        NAMED_USER if *id != 0 && *id != trusted => Some(format!("user {}", user_name(*id))),
        NAMED_GROUP if *id != 0 => Some(format!("group {}", group_name(*id))),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let bytes = entries.iter().flat_map(|(tag, rights, id)| {
            [tag.to_le_bytes().to_vec(), rights.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat()
        });
        2u32.to_le_bytes().into_iter().chain(bytes).collect()
    }

    #[test]
    fn named_users_and_groups_count_within_the_mask() {
        let of = |id, mask| {
            list(&[(1, 6, u32::MAX), (NAMED_USER, 6, id), (4, 0, u32::MAX), (MASK, mask, u32::MAX)])
        };
        assert_eq!(first_other(&of(4_000_000, 6), 1000, WRITE).as_deref(), Some("user 4000000"));
        assert_eq!(first_other(&of(4_000_000, 4), 1000, WRITE), None);
        assert_eq!(first_other(&of(1000, 6), 1000, WRITE), None);
        assert_eq!(first_other(&of(0, 6), 1000, WRITE), None);
        let group = list(&[(NAMED_GROUP, 4, 4_000_000)]);
        assert_eq!(first_other(&group, 1000, READ).as_deref(), Some("group 4000000"));
        assert_eq!(first_other(&group[..7], 1000, READ), None);
    }
}
