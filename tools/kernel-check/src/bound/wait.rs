//! How often a unit waits for memory.

use std::collections::HashMap;

use super::code::{Code, Moved, Register};

/// Latencies of memory that one unit waits on a path, if an instruction takes no time but for waiting
/// until the registers that it names are loaded; of a loop, per turn after the first ones.
pub fn latencies(code: &Code, path: &[usize], moved: &[Moved], is_loop: bool) -> f64 {
    let mut unit = Unit::default();
    if !is_loop {
        unit.walk(code, path, moved);
        return f64::from(unit.clock);
    }
    let turns = 4;
    (0..turns).for_each(|_| unit.walk(code, path, moved));
    let before = unit.clock;
    (0..turns).for_each(|_| unit.walk(code, path, moved));
    f64::from(unit.clock - before) / f64::from(turns)
}

/// A unit and what it waits for, in latencies.
#[derive(Default)]
struct Unit {
    clock: u32,
    /// When registers that are being loaded will be there.
    ready: HashMap<Register, u32>,
}

impl Unit {
    fn walk(&mut self, code: &Code, path: &[usize], moved: &[Moved]) {
        for at in path {
            let instruction = &code.instructions[*at];
            for register in instruction.registers() {
                if let Some(ready) = self.ready.remove(&register) {
                    self.clock = self.clock.max(ready);
                }
            }
            if moved[*at].loads {
                for register in instruction.loaded() {
                    self.ready.insert(register, self.clock + 1);
                }
            }
        }
    }
}
