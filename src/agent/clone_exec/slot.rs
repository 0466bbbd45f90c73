//! Launch slot: memory of the launcher that one new process uses at a time.
//!
//! A process that shares the launcher's memory reads its arguments from its slot until `execve`. The kernel then clears the
//! slot's word ([`LaunchSlot::is_free`]).

use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use super::child::ChildContext;
use super::launch_block::{ChildMemory, MAX_INLINE, STACK};

/// One slot.
pub struct LaunchSlot {
    /// The lowest address of the stack.
    start: *mut u8,
    /// Space for data above the stack.
    capacity: usize,
    /// Not zero while a process uses the slot. In an allocation of its own, because the kernel writes it.
    word: Box<AtomicI32>,
    /// Bytes of data that the slot may contain.
    filled: usize,
}

impl LaunchSlot {
    /// `in_forks`: a forked process has a copy of the slot.
    pub fn map(capacity: usize, in_forks: bool) -> io::Result<LaunchSlot> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let length = STACK + capacity;
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let slot = LaunchSlot { start: start.cast(), capacity, word: Box::default(), filled: 0 };
        // SAFETY: the range is the new mapping.
        if !in_forks && unsafe { libc::madvise(start, length, libc::MADV_DONTFORK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(slot)
    }

    /// Whether the last process of the slot has called `execve` or is gone.
    pub fn is_free(&self) -> bool {
        self.word.load(Ordering::Acquire) == 0
    }

    /// The space for data of a free slot.
    pub fn space(&mut self) -> &mut [u8] {
        debug_assert!(self.is_free());
        self.filled = self.capacity;
        // SAFETY: the range is inside the mapping; no process uses it, and bytes have no invalid values.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(STACK), self.capacity) }
    }

    /// Records how much of the space is used.
    pub fn set_filled(&mut self, length: usize) {
        self.filled = length.min(self.capacity);
    }

    /// Overwrites the data of a free slot: the environment may contain secrets.
    pub fn clear(&mut self) {
        let filled = std::mem::take(&mut self.filled);
        self.space()[..filled].fill(0);
        self.filled = 0;
    }

    /// The context in the data of an image. An error: the data is not that of an image.
    pub fn context(&mut self) -> io::Result<&mut ChildContext> {
        match self.filled < size_of::<ChildContext>() {
            true => Err(io::ErrorKind::InvalidInput.into()),
            // SAFETY: the agent initialized the context, in a program of the same version, and no process uses it.
            false => Ok(unsafe { &mut *self.memory().context }),
        }
    }

    /// Makes pointers of the offsets in the data of an image.
    pub fn relocate(&mut self) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let (start, filled) = (self.start, self.filled);
        let context = self.context()?;
        let (from, count) = context.lists;
        let length = count.checked_mul(size_of::<*const c_char>()).ok_or_else(invalid)?;
        let is_inside = from >= STACK + size_of::<ChildContext>()
            && from.checked_add(length).is_some_and(|end| end <= STACK + filled);
        if !is_inside || !from.is_multiple_of(align_of::<*const c_char>()) {
            return Err(invalid());
        }
        // SAFETY: the range is inside the data, aligned, and after the context.
        unsafe {
            let lists = std::slice::from_raw_parts_mut(start.add(from).cast(), count);
            context.relocate(start as isize, lists);
        }
        Ok(())
    }

    /// A copy of the data, in memory that a forked process has a copy of.
    pub fn copy_for_fork(&mut self) -> io::Result<LaunchSlot> {
        let filled = self.filled;
        let mut copy = LaunchSlot::map(filled, true)?;
        copy.space().copy_from_slice(&self.space()[..filled]);
        self.clear();
        Ok(copy)
    }

    /// Bytes of data that the slot may contain.
    pub fn filled(&self) -> usize {
        self.filled
    }

    pub fn memory(&self) -> ChildMemory {
        ChildMemory::at(self.start)
    }

    /// Marks the slot as used. Returns the address that the kernel clears.
    pub fn begin_use(&self) -> *mut c_int {
        self.word.store(1, Ordering::Release);
        self.word.as_ptr()
    }

    /// No process was created.
    pub fn end_use(&self) {
        self.word.store(0, Ordering::Release);
    }
}

impl Drop for LaunchSlot {
    fn drop(&mut self) {
        debug_assert!(self.is_free());
        // SAFETY: this value owns the mapping, and no process uses it.
        unsafe { libc::munmap(self.start.cast::<c_void>(), STACK + self.capacity) };
    }
}

/// The slots of a launcher. A process that a user stops before `execve` keeps its slot until the agent kills it.
#[derive(Default)]
pub struct LaunchSlots {
    slots: Vec<LaunchSlot>,
}

impl LaunchSlots {
    pub fn slot(&mut self, at: usize) -> &mut LaunchSlot {
        &mut self.slots[at]
    }

    /// The number of a free slot with space for data in a request.
    pub fn free(&mut self) -> io::Result<usize> {
        let free = self.slots.iter().position(|slot| slot.is_free() && slot.capacity == MAX_INLINE);
        let at = match free {
            Some(at) => at,
            None => self.add(LaunchSlot::map(MAX_INLINE, false)?),
        };
        if self.slots[at].filled > 0 {
            self.slots[at].clear();
        }
        Ok(at)
    }

    /// The number of a new slot with the content of a file.
    pub fn large(&mut self, length: usize, file: &File) -> io::Result<usize> {
        self.clear_free();
        let mut slot = LaunchSlot::map(length.max(MAX_INLINE + 1), false)?;
        file.read_exact_at(&mut slot.space()[..length], 0)?;
        slot.set_filled(length);
        Ok(self.add(slot))
    }

    fn add(&mut self, slot: LaunchSlot) -> usize {
        self.slots.push(slot);
        self.slots.len() - 1
    }

    /// Clears the data of free slots, and removes those of larger data.
    pub fn clear_free(&mut self) {
        self.slots.retain(|slot| slot.capacity == MAX_INLINE || !slot.is_free());
        self.slots.iter_mut().filter(|slot| slot.filled > 0 && slot.is_free()).for_each(LaunchSlot::clear);
    }

    /// Whether a slot has the data of a launch.
    pub fn are_filled(&self) -> bool {
        self.slots.iter().any(|slot| slot.filled > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_slot_is_neither_selected_nor_cleared() {
        let mut slots = LaunchSlots::default();
        let first = slots.free().expect("a slot");
        slots.slot(first).space()[0] = 7;
        slots.slot(first).set_filled(1);
        let word = slots.slot(first).begin_use();
        slots.clear_free();
        assert!(slots.are_filled() && slots.free().is_ok_and(|second| second != first));
        // SAFETY: the word of a slot is an atomic number. The kernel clears it in the same way.
        unsafe { AtomicI32::from_ptr(word) }.store(0, Ordering::Release);
        slots.clear_free();
        assert!(!slots.are_filled());
        assert_eq!(slots.free().expect("a slot"), first);
        assert_eq!(slots.slot(first).space()[0], 0);
    }

    #[test]
    fn data_that_is_not_an_image_is_refused() {
        let mut slot = LaunchSlot::map(MAX_INLINE, false).expect("memory");
        slot.space().fill(0);
        assert!(slot.relocate().is_err(), "the lists are outside the data");
        slot.set_filled(8);
        assert!(slot.context().is_err());
    }
}
