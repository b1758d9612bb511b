# Completion for bash; zsh has a file of its own.
# It asks fastports itself, so that it is never behind.
_fastports() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words i
  if ((COMP_CWORD == 1)); then
    words="$(fastports --help | sed -n 's/^  \([a-z]\{2,\}\)  .*/\1/p') --help --version"
  elif [[ $before == --protocol ]]; then
    words="tcp udp both"
  elif [[ $before == --restart ]]; then
    words="always on-failure no"
  elif [[ $before == --handoff && ${COMP_WORDS[1]} == portserver ]]; then
    words="close door"
  elif [[ $before == --handoff ]]; then
    words="auto broker fd bind-door door close"
  else
    for ((i = 2; i < COMP_CWORD; i++)); do
      if [[ ${COMP_WORDS[i]} == -- ]]; then # another program's line
        COMPREPLY=()
        return
      fi
    done
    words="$({
      fastports "${COMP_WORDS[1]}" --help 2>/dev/null
      [[ ${COMP_WORDS[1]} != run ]] || fastports help supervise
    } |
      sed -n 's/^  *-/-/p' | sed 's/  .*//' | grep -oE -- '(^|[ ,])--?[a-z_-]+' | tr -d ' ,') --help"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _fastports fastports
