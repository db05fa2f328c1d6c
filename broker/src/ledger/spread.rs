//! Keeps pollers apart. All of them read the same rows in the same order; without this, three workers claim each shard almost three
//! times, and two of the claims are refused. So each look takes more into view than it needs, and a random run out of it.

use std::ops::Range;

/// How many times what is needed comes into view.
pub(super) const WIDTH: usize = 8;
/// The last few are not shared out.
const FEW: usize = 8;

/// The run to take of `seen` shards when `wanted` are needed at most. Where there are not enough for everybody it takes a part only:
/// the next look is not far.
pub(super) fn choose(seen: usize, wanted: usize, dice: usize) -> Range<usize> {
    if seen <= FEW {
        return 0..seen.min(wanted);
    }
    let length = wanted.min(seen.div_ceil(4)).max(1);
    let start = dice % (seen - length + 1);
    start..start + length
}

/// A random number: of a version 7 UUID's tail, as a generator of its own would be too much for this.
pub(super) fn dice() -> usize {
    let bytes = *uuid::Uuid::now_v7().as_bytes();
    usize::from(u16::from_be_bytes([bytes[14], bytes[15]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_never_more_than_wanted_nor_outside_and_never_nothing() {
        for seen in 0..200 {
            for wanted in [1, 7, 64] {
                for dice in [0, 1, 17, usize::MAX] {
                    let run = choose(seen, wanted, dice);
                    assert!(run.start <= run.end && run.end <= seen && run.len() <= wanted, "{seen} {wanted} {dice}");
                    assert!(seen == 0 || !run.is_empty(), "{seen} {wanted} {dice}");
                }
            }
        }
        assert_eq!(choose(5, 64, 3), 0..5, "the last few go as a whole");
        assert_eq!(choose(512, 64, 7), 7..71);
    }
}
