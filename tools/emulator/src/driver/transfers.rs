//! Copies and fills. Each address is checked against the allocated memory.

use std::sync::Arc;

use crate::memory::Snapshot;

/// An endpoint of a copy.
#[derive(Clone, Debug)]
pub(super) enum CopyEndpoint {
    /// Device memory.
    Device(u64),
    /// Host memory that is accessed when the copy runs.
    Host(usize),
    /// The content of host memory at the time of the call.
    Staged(Arc<[u8]>),
}

/// A copy of rows of bytes. A contiguous copy has one row.
#[derive(Clone, Debug)]
pub(super) struct Copy {
    pub to: CopyEndpoint,
    pub from: CopyEndpoint,
    /// The number of bytes of a row, and the number of rows.
    pub width: usize,
    pub height: usize,
    /// The distances between rows in bytes.
    pub to_pitch: usize,
    pub from_pitch: usize,
}

/// A fill with a repeated pattern.
#[derive(Clone, Debug)]
pub(super) struct FillPattern {
    pub address: u64,
    pub pattern: Vec<u8>,
    pub count: usize,
}

impl CopyEndpoint {
    /// Checks that the endpoint lies in allocated memory.
    fn check(&self, memory: &Snapshot, bytes: usize) -> Result<(), String> {
        match self {
            Self::Device(address) => check(memory, *address, bytes),
            Self::Host(0) => Err("a copy of the host's address 0".into()),
            Self::Host(_) | Self::Staged(_) => Ok(()),
        }
    }

    fn pointer(&self) -> *mut u8 {
        match self {
            Self::Device(address) => *address as *mut u8,
            Self::Host(address) => *address as *mut u8,
            // This pointer is never written: only sources are staged.
            Self::Staged(bytes) => bytes.as_ptr().cast_mut(),
        }
    }
}

fn check(memory: &Snapshot, address: u64, bytes: usize) -> Result<(), String> {
    if memory.holds(address, bytes) {
        Ok(())
    } else {
        let nearest = memory.nearest(address);
        Err(format!(
            "{bytes} bytes at {address:#x} are copied or filled: {nearest}"
        ))
    }
}

impl Copy {
    /// Returns a contiguous copy.
    pub fn row(to: CopyEndpoint, from: CopyEndpoint, width: usize) -> Self {
        Self {
            to,
            from,
            width,
            height: 1,
            to_pitch: width,
            from_pitch: width,
        }
    }

    /// Returns the size of the region at an endpoint with this pitch, or `None` on overflow.
    fn span(&self, pitch: usize) -> Option<usize> {
        let above = self.height.checked_sub(1)?.checked_mul(pitch)?;
        above.checked_add(self.width)
    }

    pub fn check(&self, memory: &Snapshot) -> Result<(), String> {
        if self.height > 1 && self.to_pitch.min(self.from_pitch) < self.width {
            return Err("rows of a copy overlap".into());
        }
        for (end, pitch) in [(&self.to, self.to_pitch), (&self.from, self.from_pitch)] {
            let span = self.span(pitch).ok_or("a copy of no bytes at all")?;
            end.check(memory, span)?;
        }
        Ok(())
    }

    /// Executes the copy. Fails if a part of the memory is no longer allocated.
    pub fn perform(&self, memory: &Snapshot) -> Result<(), String> {
        self.check(memory)?;
        let (to, from) = (self.to.pointer(), self.from.pointer());
        for row in 0..self.height {
            // SAFETY: device addresses were checked. The caller guarantees host addresses until the copy is done.
            unsafe {
                let from = from.add(row * self.from_pitch);
                from.copy_to(to.add(row * self.to_pitch), self.width);
            }
        }
        Ok(())
    }

    /// Reads the current content of host memory, without gaps.
    pub fn stage(&mut self, host: usize) {
        let mut bytes = Vec::with_capacity(self.width * self.height);
        for row in 0..self.height {
            let from = (host + row * self.from_pitch) as *const u8;
            // SAFETY: the caller guarantees that all rows can be read.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from, self.width) });
        }
        self.from = CopyEndpoint::Staged(bytes.into());
        self.from_pitch = self.width;
    }
}

impl FillPattern {
    pub fn check(&self, memory: &Snapshot) -> Result<(), String> {
        let bytes = self.pattern.len().checked_mul(self.count);
        check(memory, self.address, bytes.ok_or("a fill without an end")?)
    }

    /// Executes the fill. Fails if a part of the memory is no longer allocated.
    pub fn perform(&self, memory: &Snapshot) -> Result<(), String> {
        self.check(memory)?;
        let to = self.address as *mut u8;
        for index in 0..self.count {
            let length = self.pattern.len();
            // SAFETY: all of the memory is allocated.
            unsafe {
                to.add(index * length)
                    .copy_from_nonoverlapping(self.pattern.as_ptr(), length);
            }
        }
        Ok(())
    }
}
