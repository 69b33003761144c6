//! Which sizes live long, learned while a step runs.
//!
//! Best fit alone mixes blocks that stay (saved activations, gradients) with temporaries, and the holes that temporaries
//! leave between them fit nothing later. So a block that is expected to stay is placed at the far end of a hole, where
//! it packs against its like, and a temporary at the near end. The expectation comes from the last block of the same
//! size whose fate is known: it stayed when it lived, or still lives, for more than [`LONG`] allocations. A size that
//! nothing is known about is expected to stay: a temporary misjudged once costs less than a gradient in the wrong place.

use crate::hash::AddressMap;

/// Allocations after which a block counts as long-lived. On 16 steps the waste is the same from 100 to 1600.
const LONG: u32 = 200;
/// Blocks remembered per size.
const KEPT: usize = 16;

/// Sizes remembered over several steps.
const MOST_CLASSES: usize = 4096;

/// Marks a place whose life is not followed.
pub const UNFOLLOWED: Birth = Birth {
    born: 0,
    class: u32::MAX,
};

/// When a block was born, and the class of its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Birth {
    born: u32,
    class: u32,
}

/// The blocks of one size, newest at `next - 1`.
#[derive(Debug, Clone)]
struct Class {
    born: [u32; KEPT],
    /// Life in allocations, zero while the block lives.
    life: [u32; KEPT],
    next: usize,
}

/// What is known about the sizes of one arena.
#[derive(Debug, Clone, Default)]
pub struct Lives {
    by_size: AddressMap<u32>,
    classes: Vec<Class>,
    clock: u32,
    /// Births up to here are forgotten.
    start: u32,
}

impl Lives {
    /// A block of `units` is about to be placed: whether it is expected to stay, and its birth.
    pub fn begin(&mut self, units: u32) -> (bool, Birth) {
        if self.clock == u32::MAX {
            *self = Self::default();
        }
        self.clock += 1;
        let next = self.classes.len() as u32;
        let index = *self.by_size.entry(u64::from(units)).or_insert(next);
        if index == next {
            self.classes.push(Class {
                born: [0; KEPT],
                life: [0; KEPT],
                next: 0,
            });
        }
        let class = &mut self.classes[index as usize];
        let stays = class.stays(self.clock, self.start);
        class.born[class.next % KEPT] = self.clock;
        class.life[class.next % KEPT] = 0;
        class.next += 1;
        let birth = Birth {
            born: self.clock,
            class: index,
        };
        (stays, birth)
    }

    /// The block was not placed after all: as if [`Lives::begin`] had not been called.
    pub fn cancel(&mut self, birth: Birth) {
        if let Some(class) = self.classes.get_mut(birth.class as usize)
            && class.next > 0
            && class.born[(class.next - 1) % KEPT] == birth.born
        {
            class.next -= 1;
            class.born[class.next % KEPT] = 0;
        }
    }

    /// A block is gone.
    pub fn end(&mut self, birth: Birth) {
        let Some(class) = self.classes.get_mut(birth.class as usize) else {
            return;
        };
        if let Some(at) = (0..KEPT).find(|&i| class.born[i] == birth.born) {
            class.life[at] = self.clock.saturating_sub(birth.born).max(1);
        }
    }

    /// Forget everything: the next step begins. At the end of a step all sizes look short-lived.
    pub fn forget(&mut self) {
        self.start = self.clock;
        if self.classes.len() > MOST_CLASSES {
            self.classes.clear();
            self.by_size.clear();
        }
    }
}

impl Class {
    fn stays(&self, now: u32, start: u32) -> bool {
        for back in 1..=self.next.min(KEPT) {
            let at = (self.next - back) % KEPT;
            if self.born[at] <= start {
                break;
            }
            if self.life[at] > 0 {
                return self.life[at] > LONG;
            }
            if now - self.born[at] > LONG {
                return true;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_stays_until_a_block_of_it_comes_back_soon() {
        let mut lives = Lives::default();
        let (stays, first) = lives.begin(7);
        assert!(stays, "nothing is known yet");
        lives.begin(9);
        lives.end(first);
        let (stays, _) = lives.begin(7);
        assert!(!stays, "the last one lived for one allocation");
        for _ in 0..=LONG {
            lives.begin(9);
        }
        let (stays, _) = lives.begin(7);
        assert!(stays, "the newest known one has lived for long");
    }

    #[test]
    fn a_new_step_knows_nothing_and_old_blocks_do_no_harm() {
        let mut lives = Lives::default();
        let births: Vec<Birth> = (0..3 * KEPT).map(|_| lives.begin(5).1).collect();
        for birth in births {
            lives.end(birth);
        }
        assert!(!lives.begin(5).0);
        lives.forget();
        assert!(lives.begin(5).0);
        lives.end(UNFOLLOWED);
    }

    #[test]
    fn a_block_that_found_no_room_leaves_no_trace() {
        let mut lives = Lives::default();
        let first = lives.begin(5).1;
        lives.end(first);
        assert!(!lives.begin(5).0);
        let (expected, failed) = lives.begin(5);
        lives.cancel(failed);
        assert_eq!(lives.begin(5).0, expected);
        for size in 0..2 * MOST_CLASSES as u32 {
            lives.begin(size + 1);
        }
        lives.forget();
        assert!(lives.classes.is_empty(), "random sizes do not pile up");
        lives.end(failed);
    }
}
