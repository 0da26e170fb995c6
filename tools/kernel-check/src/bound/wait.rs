//! Counts the number of times that a unit waits for memory.

use std::collections::HashMap;

use super::code::{MachineCode, MemoryTraffic, Register};

/// Returns the number of memory latencies that one unit waits for on a path. For a loop, it is the number per
/// iteration in the steady state. Instructions take no time except waiting until their registers are loaded.
pub fn latencies(
    code: &MachineCode,
    path: &[usize],
    traffic: &[MemoryTraffic],
    is_loop: bool,
) -> f64 {
    let mut unit = UnitClock::default();
    if !is_loop {
        unit.walk(code, path, traffic);
        return f64::from(unit.clock);
    }
    let turns = 4;
    (0..turns).for_each(|_| unit.walk(code, path, traffic));
    let before = unit.clock;
    (0..turns).for_each(|_| unit.walk(code, path, traffic));
    f64::from(unit.clock - before) / f64::from(turns)
}

/// The simulated clock of a unit, in latencies.
#[derive(Default)]
struct UnitClock {
    clock: u32,
    /// The time at which the pending load of each register completes.
    ready: HashMap<Register, u32>,
}

impl UnitClock {
    fn walk(&mut self, code: &MachineCode, path: &[usize], traffic: &[MemoryTraffic]) {
        for at in path {
            let instruction = &code.instructions[*at];
            for register in instruction.registers() {
                if let Some(ready) = self.ready.remove(&register) {
                    self.clock = self.clock.max(ready);
                }
            }
            if traffic[*at].loads {
                for register in instruction.loaded() {
                    self.ready.insert(register, self.clock + 1);
                }
            }
        }
    }
}
